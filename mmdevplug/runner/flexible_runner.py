"""MMEngine's FlexibleRunner with the hooks, the log and the errors that DeviceRunner has."""

from typing import Any, Dict, List, Optional

from mmengine.registry import RUNNERS
from mmengine.runner import FlexibleRunner
from torch import nn

from mmdevplug.checkpoint.fit_weights import repeat_beside
from mmdevplug.config.accelerator import to_dict
from mmdevplug.errors import DevPlugError
from mmdevplug.hooks.default_hooks import missing_hooks, replace_hook
from mmdevplug.patches.torch_load import trust_classes

from .device_log_processor import device_log_processor
from .explain_errors import explained
from .strategies import DeviceStrategy
from .train_locked import train_locked


@RUNNERS.register_module()
class DeviceFlexibleRunner(FlexibleRunner):
    """MMEngine's ``FlexibleRunner`` for :class:`DeviceStrategy`, with the hooks of DeviceRunner.

    Arguments are those of :class:`mmengine.runner.FlexibleRunner`.

    Examples:
        >>> cfg.runner_type = 'DeviceFlexibleRunner'
        >>> cfg.strategy = dict(type='DeviceStrategy', accelerator='xla')
        >>> RUNNERS.build(cfg).train()
    """

    def build_strategy(self, *args: object, **kwargs: object) -> DeviceStrategy:
        """Build the strategy, which has to be one of ours.

        Returns:
            DeviceStrategy: The strategy.

        Raises:
            DevPlugError: If it is another one, or the config has a key that it does not get.
        """
        strategy = super().build_strategy(*args, **kwargs)
        if not isinstance(strategy, DeviceStrategy):
            raise DevPlugError(
                f'DeviceFlexibleRunner got strategy={type(strategy).__name__}; expected '
                f'DeviceStrategy or ModelParallelStrategy. Others need runner_type='
                f"'FlexibleRunner'."
            )
        strategy.has_runner = True
        self._refuse_ignored_keys(strategy)
        return strategy

    def register_hooks(
        self, default_hooks: Optional[Dict] = None, custom_hooks: Optional[List] = None
    ) -> None:
        """Register hooks as MMEngine does, and ours where there are none of their kind."""
        trust_classes(self.cfg.get('checkpoint_classes') or [])
        super().register_hooks(default_hooks, custom_hooks)
        options, context = self.strategy.accelerator_options, self.strategy.device_context
        for hook in missing_hooks(options, context, self.hooks):
            self.register_hook(hook)

    def register_hook(self, hook: object, priority: object = None) -> None:
        """Register a hook, ours in the place of some of MMEngine's."""
        safe = self.strategy.accelerator_options.safe_checkpoints
        super().register_hook(replace_hook(hook, safe), priority)

    def build_log_processor(self, log_processor: object) -> Any:
        """Build the log processor, with the memory column of any accelerator."""
        return super().build_log_processor(device_log_processor(log_processor))

    def train(self) -> nn.Module:
        """Train; an error of one rank ends all of them with its name."""
        model = train_locked(self, super().train)
        self.strategy.misfit = None
        return model

    def val(self) -> dict:
        """Validate; see :meth:`train`."""
        with explained(self, 'val'):
            return repeat_beside(super().val(), self.strategy.misfit)

    def test(self) -> dict:
        """Test; see :meth:`train`."""
        with explained(self, 'test'):
            return repeat_beside(super().test(), self.strategy.misfit)

    def _refuse_ignored_keys(self, strategy: DeviceStrategy) -> None:
        """Refuse keys that DeviceRunner reads and this runner hands to nobody."""
        options = to_dict(self.cfg.get('accelerator'))
        chosen = {key: value for key, value in options.items() if value != 'auto'}
        if chosen and strategy.given_accelerator is None:
            raise DevPlugError(
                f'DeviceFlexibleRunner ignores the config key accelerator={options!r}. Expected '
                f'it in the strategy: '
                f'strategy=dict(type={type(strategy).__name__!r}, accelerator=...).'
            )
        if self.cfg.get('model_parallel') and not strategy.parallelism.wanted:
            raise DevPlugError(
                f'DeviceFlexibleRunner ignores the config key model_parallel='
                f'{self.cfg.model_parallel!r}. Expected it in the strategy: '
                f"strategy=dict(type='ModelParallelStrategy', model_parallel=...)."
            )
