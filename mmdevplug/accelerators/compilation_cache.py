"""Keep compiled graphs on disk: the option ``accelerator.compilation_cache``."""

import os
import warnings
from typing import NamedTuple

from mmdevplug.errors import AcceleratorError

from .base import Accelerator


class KeptGraphs(NamedTuple):
    """Counts of graphs in a cache of compiled graphs on disk."""

    folder: str
    read: int  # instead of compiled
    missed: int  # not in the cache, and compiled
    unreadable: int  # in the cache, but compiled again


def start_compilation_cache(accelerator: Accelerator, folder: str, rank: int) -> None:
    """Keep the graphs that this rank compiles in its subfolder, or warn why that is impossible."""
    own = os.path.join(folder, f'rank_{rank}')
    cause = None
    try:
        os.makedirs(own, exist_ok=True)
        problem = '' if os.access(own, os.W_OK | os.X_OK) else 'cannot be written to'
    except OSError as error:
        cause, problem = error, f'cannot be made: {error}'
    if problem:
        raise AcceleratorError(
            f'accelerator.compilation_cache={folder!r}: {own} {problem}. Name a folder that every '
            f'rank can write to.'
        ) from cause
    why_not = accelerator.compilation.keep_graphs(own)
    if why_not is not None and rank == 0:
        warnings.warn(
            f'accelerator.compilation_cache={folder!r} is of no use here: {why_not}. Remove it.',
            stacklevel=2,
        )


def describe_kept(kept: KeptGraphs) -> str:
    """Describe the counts of the cache in a sentence for the log."""
    text = (
        f'compilation cache {kept.folder}: {kept.read} graphs read, {kept.missed} compiled and '
        f'written'
    )
    if kept.unreadable:
        text += (
            f', {kept.unreadable} found that could not be read and were compiled again. Either '
            f'another release of torch_xla wrote them (delete the folder), or this device cannot '
            f'read compiled graphs (remove accelerator.compilation_cache)'
        )
    return f'{text}.'
