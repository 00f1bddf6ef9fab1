"""List every symbol of another package that is replaced.

:func:`mmdevplug.utils.patching.patch_symbol` refuses symbols that are not listed. Why each is
replaced, and until when that is necessary, stands in ``docs/patch_table.py``, which writes
``patches.md``, and where it is replaced.
"""

from typing import List, NamedTuple

#: Periods in which patches are active.
JOB = 'job'
LOG_FILES = 'log files'
MODEL = 'model'
LAZY_MODEL = 'lazy model'
AUTOCAST = 'autocast'
VIDEOS = 'videos'
PROCESS_GROUP = 'process group'
MMCV_OPS = 'mmcv ops'
LOADING = 'loading'
BUILDING = 'building'
CONFIG = 'config'
GUARD = 'guard'
AUTOPATCH = 'autopatch'
WATCH = 'watch'
A_RANK = 'a rank'
WORKER = 'worker'


class PatchedSymbol(NamedTuple):
    """A symbol of another package that is replaced for a while."""

    owner: str  #: Full name of the module, the class, or the function whose closure holds it.
    name: str  #: Its name there; ``'*'`` for every public function.
    period: str  #: When the patch is active.

    def __str__(self) -> str:
        return f'{self.owner}.{self.name}'


#: By period, the symbols of an owner as ``'owner: name name'``.
_LISTED = {
    JOB: (
        'mmengine.device.utils: DEVICE',
        'mmengine.device.utils: IS_NPU_AVAILABLE',
        'mmengine.dist.dist: collect_results_cpu _collect_results_device',
        'torch.distributed: broadcast_object_list',
        'mmengine.dist.dist: _broadcast_object_list',
        'mmengine.runner.checkpoint: load_state_dict',
        'mmengine.structures.instance_data: BoolTypeTensor LongTypeTensor IndexType',
        'mmengine.infer.infer.BaseInferencer: _init_model',
        'mmengine.model.averaged_model.BaseAveragedModel: update_parameters',
        'torch.Tensor: cuda is_cuda',
        'torch.Tensor: type',
        'torch: index_select',
        'torch.Tensor: index_select',
    ),
    LOG_FILES: ('mmengine.logging.logger: _get_device_id',),
    MODEL: (
        'mmagic.models.utils.model_utils: get_module_device',
        'mmgen.models.architectures.common: get_module_device',
        'mmrazor.models.utils.utils: get_module_device',
    ),
    LAZY_MODEL: (
        'mmseg.models.losses.accuracy: accuracy',
        'torch: _shape_as_tensor',
    ),
    AUTOCAST: ('mmengine.runner.amp.autocast: func',),
    VIDEOS: ('mmdet.evaluation.metrics.base_video_metric: collect_tracking_results_cpu',),
    PROCESS_GROUP: ('torch.distributed: barrier',),
    MMCV_OPS: ('mmcv._ext: *',),
    LOADING: ('torch: load',),
    BUILDING: ('torch.nn.modules.module.Module: register_parameter',),
    CONFIG: ('mmengine.config.config: is_installed get_installed_path',),
    GUARD: ('torch.autograd.function.BackwardCFunction: apply',),
    AUTOPATCH: (
        'mmengine.runner.runner.Runner: from_cfg',
        'mmengine.runner._flexible_runner.FlexibleRunner: from_cfg',
    ),
    WATCH: ('sys: excepthook',),
    A_RANK: ('warnings: showwarning',),
    WORKER: ('torch.utils.data._utils.fetch._MapDatasetFetcher: fetch',),
}
PATCHED_SYMBOLS: List[PatchedSymbol] = []
for _period, _listed in _LISTED.items():
    for _owner_and_names in _listed:
        _owner, _, _names = _owner_and_names.partition(': ')
        for _name in _names.split():
            PATCHED_SYMBOLS.append(PatchedSymbol(_owner, _name, _period))


def find_symbol(owner: str, name: str) -> PatchedSymbol:
    """Look up a symbol in the list, or raise LookupError."""
    for symbol in PATCHED_SYMBOLS:
        if symbol.owner == owner and symbol.name in (name, '*'):
            return symbol
    raise LookupError(
        f'{owner}.{name} is not in PATCHED_SYMBOLS of mmdevplug/utils/patched_symbols.py: add it '
        f'there, and the reason in docs/patch_table.py, before you replace it.'
    )
