"""Errors that mmdevplug raises on purpose.

Every message names the variable or key, the value found, the value expected and the next thing to
do, so that one line on one rank is enough to mend a job.
"""

from typing import List, Optional


class DevPlugError(RuntimeError):
    """Base class: catch this to tell our refusals from failures of the libraries below."""


class AcceleratorError(DevPlugError):
    """An accelerator is unknown, not installed, broken, or lacks the device asked for."""


class LaunchError(DevPlugError):
    """The launch variables or the process-group settings contradict each other."""


class StagedError(DevPlugError):
    """A collective of the backend ``staged`` cannot begin or end."""


class ModelError(DevPlugError):
    """A model cannot be placed on a device or trained in parallel as it stands."""


class PlacementError(ModelError):
    """A model cannot be spread over the devices that were asked for."""


class DeviceMismatchError(ModelError):
    """An operation got operands of different devices.

    Attributes:
        mismatch (Mismatch, optional): What the guard that found it knows of it.
    """

    mismatch: object = None


class CheckpointError(DevPlugError):
    """A checkpoint cannot be written or read."""


class SampleError(DevPlugError):
    """Samples cannot be exchanged between ranks, or there are not enough of them."""


class RankFailedError(DevPlugError):
    """Another rank failed; this rank stops because of it.

    Attributes:
        brief (str, optional): What to print where another rank prints the whole message.
    """

    brief: Optional[str] = None

    def one_line(self) -> str:
        """The message to print instead of a traceback."""
        return f'{type(self).__name__}: {self.brief or self}'


def first_line(error: object) -> str:
    """The message of an error without PyTorch's C++ frames, or the name of its type."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def chain(error: BaseException) -> List[BaseException]:
    """List an error and those that it was raised from, the outermost first."""
    found: List[BaseException] = []
    each: Optional[BaseException] = error
    while each is not None and each not in found:
        found.append(each)
        each = each.__cause__ or each.__context__
    return found
