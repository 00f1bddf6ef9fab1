"""Hold what all checkpoint hooks of a runner share: states of this rank, and a due validation."""

from typing import Any, Dict, Optional

from mmengine.hooks import Hook

from mmdevplug.utils.annotations import AnyRunner

from .participants import Participants, RandomStates, RankBuffers
from .plain_state import PlainState


class RunState:
    """The state of a run that its checkpoint hooks save and resume; the first of them resumes.

    Args:
        first (Hook): The checkpoint hook that is called first.
    """

    def __init__(self, first: Hook) -> None:
        self.first = first
        self.participants = Participants()
        self.random = RandomStates()
        self.plain: Optional[PlainState] = None
        self.buffers: Optional[RankBuffers] = None
        #: Whether the validation that follows was done; None before anything was trained.
        self.validated: Optional[bool] = None
        #: Whether a checkpoint was saved since the last iteration.
        self.saved_here = False
        #: Of the validation that has just ended, while ``after_val_epoch`` of hooks is called.
        self.metrics: Optional[Dict[str, Any]] = None
        #: The number of ranks of the checkpoint that is resumed.
        self.ranks = 0
        self.resumption: Any = None

    @classmethod
    def of(cls, runner: AnyRunner, hook: Hook) -> 'RunState':
        """Return that of a runner, which the first hook makes."""
        states = [
            each._run for each in runner.hooks if isinstance(getattr(each, '_run', None), cls)
        ]
        state = states[0] if states else hook._run
        state.participants = getattr(runner, 'participants', state.participants)
        return state
