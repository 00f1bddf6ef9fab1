"""Errors of the libraries below, in words that say what to do."""

from contextlib import contextmanager
from typing import Any, Callable, Iterator

from torch import nn

from mmdevplug.compatibility import explain_versions
from mmdevplug.dist import enter_phase, fail_together, wait_for_everyone

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


def train_together(runner: Any, train: Callable[[], nn.Module]) -> nn.Module:
    """Train, and wait in the end for all ranks.

    Args:
        runner (Runner): The runner.
        train (callable): MMEngine's own way.

    Returns:
        nn.Module: The model.

    Raises:
        DevPlugError: If training fails, on this rank or another.
    """
    with explained(runner, 'train'):
        enter_phase('data preparation')
        model = train()
        wait_for_everyone('end of training')
    enter_phase('after training')
    return model
