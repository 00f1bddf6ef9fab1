"""The context manager that users enter: :class:`DeviceGuard`."""

import threading
from types import TracebackType
from typing import Any, Callable, Dict, List, Optional, Sequence, Type

from torch import nn

from mmdevplug.config.model_parallel import GUARD_POLICIES as POLICIES
from mmdevplug.errors import DeviceMismatchError, DevPlugError
from mmdevplug.utils.logs import log_warning

from .gradients import GradientReturns
from .mismatch import Mismatch, Operand
from .mode import OperandMode
from .moving import move_operands
from .operands import Found, find_tensors, operation_name, roles, short_name
from .rules import Call, lazy_types, operand_groups, takes_several
from .stack_location import module_and_backward, source_of, user_frame, variables_of
from .stats import Moved, MoveStats, Site, SiteCount

_ADVICE = "Place the operands on one device, or use DeviceGuard(policy='move')."


class DeviceGuard:
    """Report or repair operations whose operands are on different devices.

    PyTorch's message names neither the operands nor the module, a CPU fallback mixes devices
    silently, and torch_xla aborts the process. The guard checks the operands of every operation
    of this thread before it runs, also in the backward passes that this thread starts. Operands
    that PyTorch accepts from another device are ignored: numbers and indices on the CPU, copies.

    It is a context manager that can be entered again and nested in others; the innermost is asked
    first.

    Args:
        policy (str): ``'error'`` raises before the operation runs; ``'warn'`` logs each place once
            and continues, but raises where torch_xla would abort the process; ``'move'`` copies
            operands with the fewest bytes. Defaults to ``'error'``.
        model (nn.Module, optional): The root of module paths. Defaults to None: the outermost
            module on the stack.
        allow (Sequence[str]): Operations that may take several devices, by their name or its last
            part. Defaults to ``()``.

    Raises:
        DevPlugError: If an argument is invalid, or, on first entering, if torch is older than
            1.13, or a dispatched model was moved since.

    Examples:
        >>> with DeviceGuard('move', model=model) as guard:
        ...     runner.train()
        >>> print(guard.report())
    """

    def __init__(
        self, policy: str = 'error', model: Optional[nn.Module] = None, allow: Sequence[str] = ()
    ) -> None:
        if policy not in POLICIES:
            raise DevPlugError(
                f"DeviceGuard: policy={policy!r}, expected 'error', 'warn' or 'move'. Correct "
                f'the name.'
            )
        if model is not None and not isinstance(model, nn.Module):
            raise DevPlugError(
                f'DeviceGuard: model is of type {type(model).__name__}, expected a '
                f'torch.nn.Module. Give the model, or leave it out.'
            )
        if isinstance(allow, str) or not all(isinstance(name, str) for name in allow):
            raise DevPlugError(
                f"DeviceGuard: allow={allow!r}, expected a list of names such as ['torch.equal']."
                f' Correct the list.'
            )
        self.policy = policy
        self.model = model
        self.allow = frozenset(allow)
        self._placed = False
        self._stats = MoveStats()
        self._entered = threading.local()
        self._returns = GradientReturns(self._stats)

    def __enter__(self) -> 'DeviceGuard':
        modes = self._modes()
        mode = None
        if not modes:
            for part in () if self._placed else self._dispatched():
                part.device_plan.check_placed(part)
            self._placed = True
            mode = OperandMode(self._handle)
            mode.__enter__()
            if self.policy == 'move':
                self._returns.install()
        modes.append(mode)
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        mode = self._modes().pop()
        if mode is not None:
            if self.policy == 'move':
                self._returns.remove()
            mode.__exit__(kind, error, trace)

    @property
    def moved(self) -> Moved:
        """The tensors moved so far, their bytes, and both by place."""
        return self._stats.moved()

    @property
    def sites(self) -> Dict[Site, SiteCount]:
        """The counts for each place where operands were on different devices."""
        return self._stats.sites()

    def report(self) -> str:
        """A table of the places where operands were on different devices.

        It ends with where the model is, if no plan has spread it.
        """
        text = self._stats.report()
        if self.model is None or self._dispatched():
            return text
        devices = sorted({str(parameter.device) for parameter in self.model.parameters()})
        if len(devices) == 1:
            text += (
                f'\nAll parameters of {type(self.model).__name__} are on {devices[0]}: no plan '
                f'was dispatched.'
            )
        return text

    def _dispatched(self) -> List[Any]:
        """The modules that ``dispatch`` has spread over devices."""
        modules = () if self.model is None else self.model.modules()
        return [module for module in modules if 'device_plan' in vars(module)]

    def _modes(self) -> List[Optional[OperandMode]]:
        """An entry for each time that this thread entered: a mode first, then None."""
        if not hasattr(self._entered, 'modes'):
            self._entered.modes = []
        return self._entered.modes

    def _handle(self, func: Callable, args: Sequence[object], kwargs: dict) -> object:
        """Run an operation that got tensors of different devices."""
        call = Call(func, short_name(func), args, kwargs, find_tensors(args, kwargs))
        if takes_several(call):
            return func(*args, **kwargs)
        groups = operand_groups(call)
        mixed = any(len({each.tensor.device for each in group}) > 1 for group in groups)
        if not mixed or (self.allow and self.allow & {call.name, operation_name(func)}):
            return func(*args, **kwargs)
        if self.policy == 'move':
            moves = move_operands(call, groups)
            if moves is not None:
                self._stats.add(self._site(func), moves.number, moves.bytes)
                return func(*moves.args, **moves.kwargs)
            advice = (
                "policy='move' cannot repair this: what is written to is on several devices, or "
                'a tensor is on meta, without data. Place the operands yourself.'
            )
            self._refuse(call, groups, advice)
        if self.policy == 'error':
            self._refuse(call, groups, _ADVICE)
        self._warn(call, groups)
        return func(*args, **kwargs)

    def _refuse(self, call: Call, groups: Sequence[List[Found]], advice: str) -> None:
        mismatch = self._describe(call, groups)
        self._stats.add(self._site(call.func))
        error = DeviceMismatchError(f'{mismatch}\n{advice}')
        error.mismatch = mismatch
        raise error

    def _warn(self, call: Call, groups: Sequence[List[Found]]) -> None:
        """Log a place the first time; raise where the process would abort."""
        lazy = lazy_types()
        for group in groups:
            devices = {each.tensor.device for each in group}
            if sum(device.type in lazy for device in devices) > 1:
                why = "policy='warn' goes on elsewhere, but lazy devices abort the process here."
                self._refuse(call, groups, f'{why} {_ADVICE}')
        if self._stats.add(self._site(call.func)):
            log_warning(str(self._describe(call, groups)))

    def _site(self, func: Callable) -> Site:
        source = source_of(user_frame())
        mismatch = Mismatch(operation_name(func), (), *module_and_backward(self.model), source)
        file, line, code = ('', 0, '') if source is None else source[:3]
        return Site(mismatch.operation, file, line, mismatch.where(), code)

    def _describe(self, call: Call, groups: Sequence[List[Found]]) -> Mismatch:
        bound = {each.place for group in groups for each in group}
        named = roles(call.func, [each.place for each in call.found])
        frame = user_frame()
        known = variables_of(frame)
        operands = tuple(
            Operand(
                named[place],
                t.device,
                t.dtype,
                tuple(t.shape),
                place not in bound,
                known.get(id(t), ''),
            )
            for place, t in call.found
        )
        where = module_and_backward(self.model)
        return Mismatch(operation_name(call.func), operands, *where, source_of(frame))
