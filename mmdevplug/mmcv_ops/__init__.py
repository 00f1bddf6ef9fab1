"""mmcv's compiled operators on devices that they have no kernel for."""

from .serving import MODES, check_mode, host_use, serve_operators, serving_operators, stop_serving

__all__ = [
    'MODES',
    'check_mode',
    'host_use',
    'serve_operators',
    'serving_operators',
    'stop_serving',
]
