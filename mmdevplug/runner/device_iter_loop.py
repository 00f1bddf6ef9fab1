"""MMEngine's loop over iterations, which says that it is its ``run`` that trains."""

from mmengine.registry import LOOPS
from mmengine.runner import IterBasedTrainLoop
from torch import nn

from mmdevplug.registry import with_ours


@LOOPS.register_module()
class DeviceIterBasedTrainLoop(IterBasedTrainLoop):
    """MMEngine's loop over iterations.

    When it is resumed, MMEngine's :meth:`run` takes and drops the batches that were trained on. A
    loader of ours goes on where it was, so it has to know whether they are dropped: a subclass
    with a ``run`` of its own drops none, unless that calls ``super().run()``.
    """

    lost = 'a resumed run may train on other batches'
    #: Whether MMEngine's ``run`` was entered.
    runs_as_mmengine = False

    def run(self) -> nn.Module:
        """Train; see :meth:`mmengine.runner.IterBasedTrainLoop.run`."""
        self.runs_as_mmengine = True
        return super().run()


def ours_of_loop(cfg: object) -> object:
    """Replace the class in a loop's config by ours, or put ours under it."""
    # MMEngine's runner takes `by_epoch=False` for this class.
    if isinstance(cfg, dict) and cfg.get('by_epoch') is False and 'type' not in cfg:
        cfg = dict(type=IterBasedTrainLoop, **{k: cfg[k] for k in cfg if k != 'by_epoch'})
    return with_ours(LOOPS, cfg)
