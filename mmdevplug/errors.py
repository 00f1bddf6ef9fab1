"""Errors that mmdevplug raises on purpose.

Every message names the variable or key, the value found, the value expected and the next thing to
do, so that one line on one rank is enough to mend a job.
"""


class DevPlugError(RuntimeError):
    """Base class: catch this to tell our refusals from failures of the libraries below."""


class AcceleratorError(DevPlugError):
    """An accelerator is unknown, not installed, broken, or lacks the device asked for."""


class LaunchError(DevPlugError):
    """The launch variables or the process-group settings contradict each other."""


class ModelError(DevPlugError):
    """A model cannot be placed on a device or trained in parallel as it stands."""


class RankFailedError(DevPlugError):
    """Another rank failed; this rank stops because of it."""
