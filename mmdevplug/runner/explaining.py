"""Errors of the libraries below, in words that say what to do."""

from contextlib import contextmanager
from typing import Any, Iterator

from mmdevplug.compatibility import explain_versions
from mmdevplug.dist import fail_together

from .explain_cuda import explain_cuda
from .out_of_memory import explain_out_of_memory


@contextmanager
def explained(runner: Any, stage: str) -> Iterator[None]:
    """Explain an error of this rank, then tell it to the others.

    Args:
        runner (Runner): The runner.
        stage (str): ``'train'``, ``'val'`` or ``'test'``.

    Raises:
        DevPlugError: In place of an error that could be explained.
    """
    with fail_together(stage), explain_versions(), explain_cuda(stage, runner.cfg):
        with explain_out_of_memory(runner, stage):
            yield


@contextmanager
def explained_build(runner: Any, stage: str) -> Iterator[None]:
    """The same while the runner is built.

    Args:
        runner (Runner): With its config.
        stage (str): What is being built.

    Raises:
        DevPlugError: In place of an error that could be explained.
    """
    with fail_together(stage), explain_versions(), explain_cuda(stage, runner.cfg):
        yield
