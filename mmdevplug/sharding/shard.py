"""Shard the model of a runner in place, by PyTorch's ``fully_shard``."""

import functools
from dataclasses import replace
from types import MethodType
from typing import Any, Callable, Dict, List, Mapping, Optional, Union

import torch
from mmengine.hooks import EMAHook
from mmengine.logging import print_log
from mmengine.model import is_model_wrapper
from torch import distributed as torch_dist, nn
from torch.optim import Optimizer

from mmdevplug.accelerators.backend import takes_host_tensors
from mmdevplug.config.sharding import ShardingOptions
from mmdevplug.device_guard.explain import describe_place
from mmdevplug.distributed.byte_exchange import gather_json
from mmdevplug.distributed.nonfinite import FinitePolicy, names_of_nonfinite
from mmdevplug.distributed.staged_groups import staged_counterpart
from mmdevplug.errors import ModelError, first_line
from mmdevplug.fault_tolerance.failure import fail_together
from mmdevplug.model.move import refer_to, set_preprocessor_devices
from mmdevplug.model.norm_layers import check_sync_bn, convert_norm_layers
from mmdevplug.model.placement import WHOLE, Placement
from mmdevplug.model.running_stats import keep_running_statistics
from mmdevplug.staged.host_buffers import pins_memory
from mmdevplug.utils.annotations import AnyOptimWrapper, AnyRunner
from mmdevplug.utils.host import keep_freed_memory
from mmdevplug.utils.torch_compat import is_at_least

from .agreement import Agreement
from .build import (
    build_without_weights,
    has_hooks,
    initialize,
    keep_whole,
    place,
    share_plain_tensors,
)
from .states import CopyingWhole, collect_states, copy_shards, is_sharded, shard_optimizer_state
from .written import WrittenWeights, gather_for_backward


class Sharding(Placement):
    """Builds, shards and initializes the model of a runner, if its config says so.

    The model stays the object that it is, with its class, its names and its ``train_step``:
    PyTorch's FSDP2 replaces its parameters by DTensors, of which each rank holds a part, and
    gathers those of a block while the block computes.
    """

    whole = False
    build = staticmethod(build_without_weights)
    collect = staticmethod(collect_states)
    loading = CopyingWhole

    def __init__(self, config: Union[bool, Mapping[str, object]]) -> None:
        self.options = ShardingOptions.from_config(config)
        self.writes_shards = self.options.sharded_checkpoint
        self._watched: Optional[AnyOptimWrapper] = None
        #: On rank 0, until weights are initialized.
        self._whole: Optional[nn.Module] = None

    def check(self, runner: AnyRunner) -> Placement:
        """Refuse what cannot be sharded before the model is built; one process keeps it whole."""
        context, version = runner.device_context, torch.__version__
        if context.backend is None:
            print_log('sharding has no effect in a single process: start more.', 'current')
            return WHOLE
        device, on_host = context.device, context.device.type == 'cpu'
        ranks, world_size = self.options.ranks or 1, torch_dist.get_world_size()
        given = [*filter(runner.cfg.get, ('model_wrapper_cfg', 'compile'))]
        # The first release whose fully_shard works on the CPU, and the first whose DTensor gathers
        # tensors of devices without functional collectives of their own, or from two devices.
        needed = '2.7' if on_host or device.type == 'cuda' and not self.options.offload else '2.13'
        _refuse(
            context.accelerator.compilation.lazy,
            f'on {device}: FSDP2 frees gathered weights between operations, and those of a lazy '
            f'device have no memory before a graph runs. On torch_xla one process divides them: '
            f"accelerator=dict(type='xla', spmd=True). Elsewhere use model_parallel",
        )
        _refuse(not is_at_least(needed), f'needs PyTorch {needed}; found {version}. Upgrade')
        streams = on_host or hasattr(getattr(torch, device.type, 0), 'Stream')
        _refuse(not streams, f'on {device} needs torch.{device.type}.Stream')
        _refuse(given, f'and {", ".join(given)}: each arranges the model its own way. Keep one')
        _refuse(world_size % ranks, f'with ranks={ranks}: expected a divisor of {world_size}')
        if on_host and self.options.offload:
            print_log('sharding.offload has no effect: the CPU is the host.', 'current')
        if on_host:
            # Of freed weights of many sizes, glibc would keep more than the whole model.
            keep_freed_memory(largest=1 << 20)
        return self

    def place(self, model: nn.Module, runner: AnyRunner, wrapper: object = None) -> nn.Module:
        """Put the model on the device of this rank block by block, each sharded at once."""
        from torch.distributed import fsdp
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

        from .find_blocks import find_blocks  # loads model_parallel

        context, sync_bn = runner.device_context, runner.cfg.get('sync_bn')
        check_sync_bn(sync_bn)
        _check_parameters(model)
        options, device, world_size = self.options, context.device, torch_dist.get_world_size()
        offload = options.offload and device.type != 'cpu'
        more: Dict[str, Any] = {}
        model = convert_norm_layers(model, context.accelerator, device, sync_bn)
        self._whole = keep_whole(model) if runner._train_loop is not None else None
        keep_running_statistics(model, context.accelerator, device)
        ranks = options.ranks or world_size
        if ranks == world_size and torch_dist.get_backend() in ('gloo', 'staged'):
            # Shared memory inside a host, where gloo takes sockets.
            mesh = DeviceMesh.from_group(staged_counterpart(), device.type)
        else:
            shape, names = (world_size // ranks, ranks), ('copies', 'shard')
            if offload and not takes_host_tensors():  # of which norms and whole weights are made
                both = f'cpu:gloo,{device.type}:{torch_dist.get_backend()}'
                more = dict(backend_override=dict.fromkeys(names, both))
            mesh = init_device_mesh(device.type, shape, mesh_dim_names=names, **more)
            mesh = mesh if ranks < world_size else mesh['shard']
        half, full = (torch.bfloat16, torch.float32) if options.mixed_precision else (None, None)
        policy = fsdp.MixedPrecisionPolicy(param_dtype=half, reduce_dtype=full)
        kept = fsdp.CPUOffloadPolicy(pins_memory(device.type)) if offload else fsdp.OffloadPolicy()
        wrap: Any = functools.partial(fsdp.fully_shard, mesh=mesh, offload_policy=kept)
        modules, found = dict(model.named_modules()), find_blocks(model, options.blocks)
        blocks = {name: modules[name] for name in ('', *found)}
        before = [
            (slots, n, p)
            for part in blocks[''].modules()
            for slots in [part._parameters]
            for n, p in slots.items()
        ]
        for block in [*blocks.values()][:0:-1]:  # inner ones first
            place(block, context)
            wrap(block, mp_policy=policy, reshard_after_forward=options.reshard_after_forward)
        place(model, context)
        wrap(model, mp_policy=replace(policy, output_dtype=full))
        for part in blocks.values():
            part.unshard()  # once outside of inference mode, or weights could not be trained
            part.reshard()
            gather_for_backward(part)
        refer_to(model, {id(weight): place[name] for place, name, weight in before})
        if self._whole is None and runner._train_loop is None:
            share_plain_tensors(model, model, context)
        set_preprocessor_devices(model, device)
        written = WrittenWeights(model, blocks)
        model.register_forward_hook(_free_unless_training)
        agreement = None
        if takes_host_tensors():
            agreement = Agreement(model, blocks, mesh.get_group(mesh.ndim - 1))
        for step in ('train_step', 'val_step', 'test_step'):
            setattr(model, step, functools.partial(_run_step, model, step, written, agreement))
        print_log(f'sharding: {len(found)} blocks over {ranks} of {world_size} ranks.', 'current')
        return model

    def initialize(self, model: nn.Module, runner: AnyRunner) -> None:
        """Initialize the weights as one process does."""
        context = runner.device_context
        initialize(model, self._whole, context)
        share_plain_tensors(model, self._whole or model, context)
        self._whole = None

    def watch(self, optim_wrapper: AnyOptimWrapper, model: nn.Module) -> None:
        """Let the optimizer load whole states, and check its gradients before each update."""
        if optim_wrapper is self._watched:
            return
        self._watched = optim_wrapper
        optimizer = getattr(optim_wrapper, 'optimizer', optim_wrapper)
        kind = type(optimizer).__name__
        _refuse(
            not isinstance(optimizer, Optimizer) or kind == 'ZeroRedundancyOptimizer',
            f'with {kind}: expected one Optimizer of PyTorch, and a model that is called whole',
        )
        optimizer.register_load_state_dict_pre_hook(shard_optimizer_state)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        check = functools.partial(_check_gradients, optimizer, names, optim_wrapper)
        # Before clipping, which spreads NaN to all gradients, or passes over it.
        optim_wrapper.step = _before(optim_wrapper, check)
        clip = getattr(optim_wrapper, 'clip_func', None)
        if clip is not None:
            optim_wrapper.clip_func = giving_whole(clip)

    def check_hooks(self, runner: AnyRunner) -> None:
        """Let a hook average the model, unless it needs whole weights that are not gathered."""
        averaging = [type(hook).__name__ for hook in runner.hooks if isinstance(hook, EMAHook)]
        if averaging:
            runner.model.__deepcopy__ = functools.partial(copy_shards, runner.model)
        published = any(getattr(hook, 'published_keys', None) for hook in runner.hooks)
        found = [*averaging, *['published_keys'] * published]
        if self.options.sharded_checkpoint:
            _refuse(found, f'with sharded_checkpoint and {found}, of whole weights. Keep one')


def _refuse(found: object, text: str) -> None:
    if found:
        raise ModelError(f'sharding {text}.')


def _run_step(
    model: nn.Module,
    step: str,
    written: WrittenWeights,
    agreement: Optional[Agreement],
    *args: object,
    **kwargs: object,
) -> object:
    with fail_together('training' if step == 'train_step' else 'evaluation'):
        written.check()
        try:
            result = getattr(type(model), step)(model, *args, **kwargs)
        except RuntimeError as error:
            at = f'{first_line(error)[:80]}{describe_place(error, model)}'
            _refuse(
                'mixed torch.Tensor and DTensor' in str(error),
                f'has whole weights while the module that holds them is called, and these were '
                f'read outside of it. For a penalty on weights in the loss, set weight_decay of '
                f'the optimizer, or compute it in the forward of each block; name in '
                f'sharding.blocks a part that a step calls by itself, as test-time augmentation '
                f'does: {at}',
            )
            _refuse(
                'meta tensor' in str(error) or 'device meta' in str(error),
                f'builds the model without values on all ranks but the first, and a tensor that '
                f'is neither a parameter, nor a buffer, nor an attribute of a module was made '
                f'there. Make it a buffer, self.register_buffer(...): {at}',
            )
            raise
        written.check()
        if agreement is not None:
            agreement.end_step()
        return result


def _free_unless_training(model: nn.Module, *_: object) -> None:
    # FSDP2 keeps modules gathered for a backward pass, which does not come then.
    for part in model.modules() if not torch.is_grad_enabled() else ():
        getattr(part, 'reshard', list)()


def giving_whole(clip: Callable) -> Callable:
    """Gather the norm that is logged: PyTorch 2.9 takes the number of one rank's part for it."""

    @functools.wraps(clip)
    def clipped(*args: Any, **kwargs: Any) -> Any:
        norm = clip(*args, **kwargs)
        return norm.full_tensor() if is_sharded(norm) else norm

    return clipped


def _before(optim_wrapper: AnyOptimWrapper, check: Callable[[], None]) -> Callable[..., object]:
    """Return a method that checks before each update; MMEngine's schedulers ask whose it is."""
    step = optim_wrapper.step

    @functools.wraps(step)
    def checked(_: object, *args: object, **kwargs: object) -> object:
        check()
        return step(*args, **kwargs)

    return MethodType(checked, optim_wrapper)


def _check_gradients(
    optimizer: Optimizer, names: Mapping[int, str], optim_wrapper: object
) -> None:
    """Refuse an update with gradients that are not finite, or of different parameters by rank.

    As in data parallel training, NaN is looked for where the host averages, and left to a gradient
    scaler, which skips the update.
    """
    trained = [p for group in optimizer.param_groups for p in group['params'] if p.requires_grad]
    without = [number for number, each in enumerate(trained) if each.grad is None]
    scaler = getattr(optim_wrapper, 'loss_scaler', None)
    found: List[str] = []
    if takes_host_tensors() and not (scaler is not None and scaler.is_enabled()):
        parts = [(names[id(p)], p.grad) for p in trained if p.grad is not None]
        parts = [(name, g.to_local() if is_sharded(g) else g) for name, g in parts]
        if not all(bool(torch.isfinite(part.sum())) for _, part in parts):
            found = names_of_nonfinite(parts)[:5]
    of_ranks = gather_json([without, found])
    _refuse(
        any(each != without for each, _ in of_ranks),
        f'averages gradients that all ranks have, and at {[each for each, _ in of_ranks]}, by '
        f'rank, there are none. Use the same parts of the model on all ranks, or add 0 * the sum '
        f'of the others to the loss',
    )
    if any(each for _, each in of_ranks):
        FinitePolicy(True).stop(found, ignorable=False)


def _check_parameters(model: nn.Module) -> None:
    _refuse(is_model_wrapper(model), f'of a {type(model).__name__}. Pass the model inside of it')
    problems = [f'{n} has no dimension' for n, p in model.named_parameters() if p.dim() == 0]
    problems += [f'{n} has a hook' for n, p in model.named_parameters() if has_hooks(p)]
    problems += [f'{n} has sparse=True' for n, m in model.named_modules() if vars(m).get('sparse')]
    _refuse(
        problems,
        f'of {type(model).__name__}: {"; ".join(problems[:5])} ({len(problems)} in all). Expected '
        f'parameters of one dimension or more, with dense gradients and no hooks',
    )
