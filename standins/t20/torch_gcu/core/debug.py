"""Memory, graphs and counters in words."""

import time

import torch
from t20_card import card

from .device import _check_exists, _index_of
from .model import _all_on_card, _expect, _on_card

__all__ = [
    'dump_hbm_alloc_info',
    'dump_glob_hbm_use_info',
    'add_trace_point',
    'metrics_report',
    'get_graph',
    'get_hbm_alloc_size',
]


def _stats(device):
    index = _index_of(device, optional=True)
    _check_exists(index)
    return index, card.stats(index)


def dump_hbm_alloc_info(device=None):
    index, stats = _stats(device)
    return f'xla:{index}: {stats["allocated"]} bytes in {stats["blocks"]} blocks'


def dump_glob_hbm_use_info(device=None):
    index, stats = _stats(device)
    return f'xla:{index}: {stats["allocated"]} bytes used, {stats["peak"]} at most'


def add_trace_point(trace_info='', sleep_time=1):
    time.sleep(sleep_time / 1000)


def metrics_report():
    return card.report()


def get_graph(tensor, device=None):
    _expect(tensor, (torch.Tensor, list, tuple))
    if not _on_card(tensor) and not _all_on_card(tensor):
        raise TypeError(
            f'tensor must be gcu tensor or list/tuple or gcu tensors, got {type(tensor)}'
        )
    index, stats = _stats(device)
    return f'xla:{index}: {stats["operations"]} operations since the last graph'


def get_hbm_alloc_size(device=None):
    index, stats = _stats(device)
    return stats['allocated']
