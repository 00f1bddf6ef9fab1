"""Choose where the weights of a model are, from the keys ``model_parallel`` and ``sharding``."""

from typing import Any, Dict, Optional, Sequence

from mmdevplug.errors import ModelError
from mmdevplug.model.placement import WHOLE, Placement


def choose_placement(
    model_parallel: Any, sharding: Any, device: Any, args: Sequence[Any], kwargs: Dict[str, Any]
) -> Placement:
    """Choose; the arguments are those of :class:`DeviceRunner`, and the accelerator's config.

    Raises:
        ModelError: If two keys ask for a placement.
    """
    cfg = kwargs.get('cfg') or {}
    model_parallel = cfg.get('model_parallel') if model_parallel is None else model_parallel
    sharding = cfg.get('sharding') if sharding is None else sharding
    spmd = _asks_for_spmd(device, sharding)
    spread: Optional[Placement] = None
    if model_parallel not in (None, False):
        from mmdevplug.model_parallel.apply_options import Parallelism

        model = kwargs['model'] if 'model' in kwargs else next(iter(args), None)
        others = kwargs.get('optim_wrapper'), kwargs.get('default_scope')
        spread = Parallelism.from_config(model_parallel, model, *others)
    if sharding in (None, False) and not spmd:
        return spread or WHOLE
    if spread is not None:
        other = 'accelerator.spmd' if spmd else 'sharding'
        raise ModelError(
            f'{other} and model_parallel: each arranges the model its own way. Keep one.'
        )
    if spmd:
        from mmdevplug.spmd.placement import Spmd

        return Spmd(sharding)
    from mmdevplug.sharding import Sharding

    return Sharding(sharding)


def _asks_for_spmd(device: object, sharding: object) -> bool:
    """Whether one process drives all chips; on torch_xla nothing else shards weights.

    ``device`` is the config of the accelerator, which learns it.
    """
    if not isinstance(device, dict):
        return bool(getattr(device, 'spmd', False))
    if sharding not in (None, False) and device.get('type') == 'xla':
        device.setdefault('spmd', True)
    return bool(device.get('spmd'))
