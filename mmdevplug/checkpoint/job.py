"""Name a training job, so that its restarts know its checkpoints, whatever clocks say."""

import io
import json
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, Dict, NamedTuple, Optional
from uuid import uuid4

from mmdevplug.distributed.waiting import run_on_main
from mmdevplug.environments.launch_variables import names_of_launch, restarts
from mmdevplug.utils.annotations import AnyRunner

from .writing import STARTED, PathLike, write_text

#: The index of a checkpoint holds names and shapes; a larger one is not read.
_MOST_BYTES = 64 << 20


class Job(NamedTuple):
    """A training, from its first start to its last restart."""

    #: Drawn by the first start; checkpoints hold it.
    name: str
    #: How often it was started again.
    restarts: int


def begin_job(runner: AnyRunner) -> Job:
    """Name the job of a runner that begins to train: anew, or as the start before a restart did.

    The name is noted in the work directory. All ranks take part.
    """
    launcher = runner.device_context.env.launcher
    count, work_dir = restarts(launcher), Path(runner.work_dir)

    def begin() -> str:
        noted, names = read_job(work_dir), names_of_launch(launcher)
        if count and set(names) & set(noted.get('launch', [])):
            return noted['job']
        job = uuid4().hex
        write_text(json.dumps(dict(job=job, launch=names)), work_dir / STARTED)
        return job

    return Job(run_on_main('naming the job', begin), count)


def read_job(work_dir: PathLike) -> Dict[str, Any]:
    """Read what the last job in a work directory has noted; nothing where that is not known."""
    try:
        found = json.loads((Path(work_dir) / STARTED).read_text(encoding='utf-8'))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and isinstance(found.get('job'), str) else {}


def note_saved(work_dir: PathLike, address: str) -> None:
    """Note that the job has saved to an object store, where files are not looked into."""
    write_text(json.dumps(dict(read_job(work_dir), saved=address)), Path(work_dir) / STARTED)


# what a checkpoint says -------------------------------------------------------------------------


class Origin(NamedTuple):
    """Where a checkpoint comes from."""

    job: Optional[str] = None
    iteration: int = -1


def origin_of(path: PathLike) -> Origin:
    """Read the job and the iteration of a checkpoint; no code of the file runs.

    Tensors are not read. What another program has written has no job.
    """
    index = read_index(path)
    meta = index.get('meta') if isinstance(index, dict) else None
    if not isinstance(meta, dict):
        return Origin()
    job, iteration = meta.get('job'), meta.get('iter')
    if isinstance(job, str) and isinstance(iteration, int):
        return Origin(job, iteration)
    return Origin()


def read_index(path: PathLike) -> object:
    """Read what a checkpoint holds besides tensors; no code of the file runs.

    Returns:
        object: Containers, numbers and text; None if the file is no archive of PyTorch's.
    """
    try:
        with zipfile.ZipFile(str(path)) as archive:
            (index,) = [one for one in archive.infolist() if one.filename.endswith('/data.pkl')]
            if index.file_size > _MOST_BYTES:
                return {}
            return _Reader(io.BytesIO(archive.read(index))).load()
    except Exception:  # whatever a damaged file leads to
        return None


class _Inert:
    """Stands in for whatever a pickle names, and does nothing."""

    def __new__(cls, *args: object, **kwargs: object) -> '_Inert':
        return super().__new__(cls)

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __call__(self, *args: object, **kwargs: object) -> '_Inert':
        return self

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass

    def extend(self, values: object) -> None:
        pass

    append = add = update = extend


class _Reader(pickle.Unpickler):
    """Builds containers, numbers and text, and nothing that a file names."""

    def find_class(self, module: str, name: str) -> object:
        is_dict = (module, name) == ('collections', 'OrderedDict')
        return OrderedDict if is_dict else _Inert

    def persistent_load(self, pid: object) -> None:
        return None
