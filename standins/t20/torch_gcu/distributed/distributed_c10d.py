"""Collectives over ``eccl``, which is not installed: they check arguments and refuse."""

import os
import warnings
from datetime import timedelta

import torch
from torch.distributed.constants import default_pg_timeout

from .._GCUC import PrefixStore, ProcessGroup, ReduceOp, Store  # noqa: F401
from .rendezvous import register_rendezvous_handler, rendezvous  # noqa: F401

try:
    from .._GCUC import ProcessGroupECCL  # noqa: F401

    _ECCL_AVAILABLE = True
except ImportError:
    warnings.warn('import ProcessGroupECCL failed', stacklevel=1)
    _ECCL_AVAILABLE = False

STORE_BASED_BARRIER_PREFIX = 'store_based_barrier_key'


def supports_complex(reduceOp):
    names = ('MAX', 'MIN', 'PRODUCT', 'BAND', 'BOR', 'BXOR')
    return reduceOp not in [getattr(ReduceOp, name) for name in names]


class Backend:
    """Turns a backend's name into the name as it is kept; `undefined` for what is not known."""

    UNDEFINED = 'undefined'
    ECCL = 'eccl'

    def __new__(cls, name):
        if not isinstance(name, str):
            raise ValueError(f'Backend name must be a string, but got: {name}')
        return getattr(Backend, name.upper(), Backend.UNDEFINED)

    @classmethod
    def register_backend(cls, name, func):
        setattr(Backend, name.upper(), func)


dist_backend = Backend


class _DeprecatedReduceOp:
    def __getattr__(self, name):
        warnings.warn('torch.distributed.reduce_op is deprecated', stacklevel=2)
        return getattr(ReduceOp, name)


reduce_op = _DeprecatedReduceOp()


class group:
    WORLD = None


class GroupMember:
    WORLD = group.WORLD
    NON_GROUP_MEMBER = object()


def _get_default_group():
    if not is_initialized():
        raise RuntimeError(
            'Default process group has not been initialized, please make sure to call '
            'init_process_group.'
        )
    return GroupMember.WORLD


def _check_tensor(value, name, kind='torch.Tensor'):
    values = value if kind.startswith('List') else [value]
    if not isinstance(values, list) or not all(isinstance(v, torch.Tensor) for v in values):
        raise RuntimeError(
            f'Invalid function argument. Expected parameter `{name}` to be of type {kind}.'
        )


def _refuse(group, *tensors, lists=()):
    """Check tensors and the group as every collective of the vendor's does first.

    Args:
        group (ProcessGroup): What the caller gave; None for the group of all ranks.
        *tensors: Pairs of a value and its name.
        lists (tuple): Such pairs of lists of tensors.
    """
    for value, name in lists:
        _check_tensor(value, name, 'List[torch.Tensor]')
    for value, name in tensors:
        _check_tensor(value, name)
    if group is not GroupMember.NON_GROUP_MEMBER:
        _get_default_group()


def is_eccl_available():
    return _ECCL_AVAILABLE


def is_initialized():
    return GroupMember.WORLD is not None


def is_torchelastic_launched():
    return os.getenv('TORCHELASTIC_RUN_ID') is not None


def get_backend(group=None):
    if group is GroupMember.NON_GROUP_MEMBER:
        raise RuntimeError('Invalid process group specified')
    return _get_default_group()


def init_process_group(
    backend,
    init_method=None,
    timeout=default_pg_timeout,
    world_size=-1,
    rank=-1,
    store=None,
    group_name='',
    pg_options=None,
):
    if not isinstance(timeout, timedelta):
        raise RuntimeError('Expected timeout argument to be of typedatetime.timedelta')
    assert store is None or init_method is None, 'Cannot specify both init_method and store.'
    if store is not None:
        assert world_size > 0, 'world_size must be positive if using store'
        assert rank >= 0, 'rank must be non-negative if using store'
    backend = Backend(backend)
    if store is None:
        # Ranks meet before the backend is looked at.
        next(rendezvous(init_method or 'env://', rank, world_size, timeout=timeout))
    if backend != Backend.ECCL:
        raise RuntimeError('only support eccl')
    raise RuntimeError("Distributed package doesn't have ECCL built in")


def destroy_process_group(group=None):
    if group is GroupMember.NON_GROUP_MEMBER:
        return
    assert (group or GroupMember.WORLD) is not None
    raise RuntimeError('Invalid process group specified')


def get_rank(group=None):
    return -1 if group is GroupMember.NON_GROUP_MEMBER else _get_default_group().rank()


def get_local_rank():
    return int(os.environ['LOCAL_RANK']) if 'LOCAL_RANK' in os.environ else get_rank()


def get_world_size(group=None):
    return -1 if group is GroupMember.NON_GROUP_MEMBER else _get_default_group().size()


def isend(tensor, dst, group=None, tag=0):
    _refuse(group, (tensor, 'tensor'))


def irecv(tensor, src=None, group=None, tag=0):
    _refuse(group, (tensor, 'tensor'))


def _sync_first(group, tensor):
    _check_tensor(tensor, 'tensor')
    if group is not GroupMember.NON_GROUP_MEMBER:
        import torch_gcu

        clusters = int(os.getenv('LEO_CLUSTER_NUM', '1'))
        torch_gcu.sync_lived_tensor(f'xla:{get_local_rank() * clusters}')
        _get_default_group()


def send(tensor, dst, group=None, tag=0):
    _sync_first(group, tensor)


def recv(tensor, src=None, group=None, tag=0):
    _check_tensor(tensor, 'tensor')
    if group is GroupMember.NON_GROUP_MEMBER:
        return -1
    return _get_default_group()


class P2POp:
    """One transfer of `batch_isend_irecv`."""

    def __init__(self, op, tensor, peer, group=None, tag=0):
        self.op, self.tensor, self.peer, self.group, self.tag = op, tensor, peer, group, tag

    def __new__(cls, op, tensor, peer, group=None, tag=0):
        if op not in (isend, irecv, send, recv):
            raise RuntimeError(
                'Invalid ``op``. Expected ``op`` to be of type ``torch.distributed.isend`` or '
                '``torch.distributed.irecv``.'
            )
        _check_tensor(tensor, 'tensor')
        return object.__new__(cls)


def batch_isend_irecv(p2p_op_list):
    if not isinstance(p2p_op_list, list) or not all(isinstance(p, P2POp) for p in p2p_op_list):
        raise RuntimeError(
            'Invalid ``p2p_op_list``. Each op is expected to to be of type '
            '``torch.distributed.P2POp``.'
        )
    get_backend(p2p_op_list[0].group)


def broadcast(tensor, src, group=None, async_op=False):
    _refuse(group, (tensor, 'tensor'))


def all_reduce(tensor, op=ReduceOp.SUM, group=None, async_op=False):
    _check_tensor(tensor, 'tensor')
    if tensor.is_complex() and not supports_complex(op):
        raise RuntimeError(f'all_reduce does not support {op} on complex tensors')
    _refuse(group)


def reduce(tensor, dst, op=ReduceOp.SUM, group=None, async_op=False):
    _refuse(group, (tensor, 'tensor'))


def all_gather(tensor_list, tensor, group=None, async_op=False):
    _refuse(group, (tensor, 'tensor'), lists=[(tensor_list, 'tensor_list')])


def all_gatherv(output_tensor, input_tensor, recv_counts, displs, group=None, async_op=False):
    _refuse(group, (input_tensor, 'input_tensor'), (output_tensor, 'output_tensor'))


def _all_gather_base(output_tensor, input_tensor, group=None, async_op=False):
    _refuse(group, (input_tensor, 'input_tensor'), (output_tensor, 'output_tensor'))


def reduce_scatter(output, input_list, op=ReduceOp.SUM, group=None, async_op=False):
    _refuse(group, (output, 'output'), lists=[(input_list, 'input_list')])


def _reduce_scatter_base(output, input, op=ReduceOp.SUM, group=None, async_op=False):
    _refuse(group, (output, 'output'), (input, 'input'))


def all_to_all_single(
    output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False
):
    _refuse(group, (output, 'output'), (input, 'input'))


def all_to_all(output_tensor_list, input_tensor_list, group=None, async_op=False):
    lists = [(output_tensor_list, 'output_tensor_list'), (input_tensor_list, 'input_tensor_list')]
    _refuse(group, lists=lists)


def barrier(group=GroupMember.WORLD, async_op=False, device_ids=None):
    _refuse(group)


def new_group(ranks=None, timeout=default_pg_timeout, backend=None, pg_options=None):
    _refuse(None)
