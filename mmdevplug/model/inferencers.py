"""Let MMEngine's inferencers, and MMEngine without a runner, compute on any accelerator."""

from functools import wraps
from typing import Any, Callable

from mmengine.infer import BaseInferencer
from mmengine.model import revert_sync_batchnorm

from mmdevplug.accelerators import Accelerator
from mmdevplug.accelerators.detection import AcceleratorConfig
from mmdevplug.patches.mmengine import patch_functions
from mmdevplug.utils.patching import patch_symbol


def patch_mmengine(accelerator: AcceleratorConfig = None) -> Accelerator:
    """Patch functions of MMEngine for an accelerator that MMEngine does not know.

    The runner calls it. Call it yourself before you use MMEngine without a
    runner, for inference for example. A second call patches for another accelerator.

    - ``mmengine.device.get_device`` returns its device type, so inferencers compute on it.
    - ``InstanceData[...]`` takes masks and indices on it.
    - ``mmengine.dist`` uses tensors that the backend of the process group takes, and gathers the
      results of metrics through it, not through a folder.
    - ``mmengine.device.is_npu_available`` is true on an NPU whose operators' compilation MMEngine
      could not set when it was imported.
    - The log files of ranks are named after the visible devices of this process.
    - ``mmengine.runner.load_checkpoint``, inferencers and ``init_cfg`` run no code from a file,
      refuse one of which nothing fits the model, and say in one line what does not.
    - ``mmengine.runner.amp.autocast`` casts on it.
    - Averaged weights (``EMAHook``) have memory of their own on torch_xla.
    - ``tensor.type()`` names the tensors of torch_xla, also on a T20, and casts to these names;
      ``index_select`` takes indices that ``sort`` returns.
    - ``tensor.cuda()`` moves to it, where there is no CUDA.

    Args:
        accelerator (str, dict or Accelerator, optional): See
            :func:`mmdevplug.get_accelerator`. Defaults to None: that of the running job, or else
            the detected one.

    Returns:
        Accelerator: The accelerator.

    Examples:
        >>> import mmdevplug
        >>> from mmdet.apis import DetInferencer
        >>> mmdevplug.patch_mmengine('xla')
        >>> DetInferencer('rtmdet-tiny')  # computes on xla
    """
    chosen = patch_functions(accelerator)
    patch_symbol(BaseInferencer, '_init_model', _for_device(BaseInferencer._init_model, chosen))
    return chosen


def _for_device(init_model: Callable, accelerator: Accelerator) -> Callable:
    """Let the models of inferencers run on any device, on lazy ones each batch as one graph."""

    @wraps(init_model)
    def init(*args: object, **kwargs: object) -> Any:
        # SyncBatchNorm of PyTorch 1 takes CUDA tensors only.
        model = revert_sync_batchnorm(init_model(*args, **kwargs))
        if accelerator.compilation.lazy:
            devices = {parameter.device for parameter in model.parameters()}
            here = [device for device in devices if device.type == accelerator.device_type]
            from .host.predictions import materialize_predictions

            materialize_predictions(model, accelerator, here)
        return model

    return init
