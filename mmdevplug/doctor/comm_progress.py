"""What each rank is doing, for those who ask which of them failed or hangs."""

import json
import os
import time
from pathlib import Path
from typing import Any, Dict, List, Optional

#: How long a rank that failed leaves the others to tell of their errors.
GRACE_SECONDS = 5.0
_STORE_PREFIX = 'mmdevplug/doctor/progress'


class Progress:
    """Tells what this rank is doing: in a file, and in the store as soon as there is one.

    Args:
        rank (int): Of this process.
        world_size (int): Number of ranks.
        folder (str, optional): Where the files of all ranks of this host go. Defaults to None.
    """

    def __init__(self, rank: int, world_size: int, folder: Optional[str] = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self.folder = None if folder is None else Path(folder)
        self.store: Any = None
        self._told: Dict[str, Any] = dict(rank=rank, count=0, stage='', error=None)

    def at(self, stage: str) -> None:
        """Begin something."""
        self._told.update(count=self._told['count'] + 1, stage=stage)
        self._tell()

    def failed(self, error: BaseException) -> None:
        """Leave the error, and give the other ranks time to leave theirs."""
        self._told['error'] = f'{type(error).__name__}: {error}'
        self._tell()
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and self.folder is not None:
            if sum(told['error'] is not None for told in read(self.folder)) == self.world_size:
                return
            time.sleep(0.1)

    def _tell(self) -> None:
        text = json.dumps(self._told)
        if self.folder is not None:
            path = self.folder / f'rank-{self.rank}.json'
            unfinished = path.with_suffix('.unfinished')
            unfinished.write_text(text, encoding='utf-8')
            os.replace(str(unfinished), str(path))
        if self.store is not None:
            try:
                self.store.set(f'{_STORE_PREFIX}/{self.rank}', text)
            except RuntimeError:
                self.store = None  # it ended with the rank that held it

    def others(self) -> List[Dict[str, Any]]:
        """What the ranks told last, as far as the store still answers."""
        found = []
        for rank in range(self.world_size if self.store is not None else 0):
            try:
                found.append(json.loads(self.store.get(f'{_STORE_PREFIX}/{rank}')))
            except RuntimeError:
                break  # it ended with the rank that held it
        return found


def read(folder: Path) -> List[Dict[str, Any]]:
    """What the ranks of this host told last, in the order of ranks."""
    files = sorted(folder.glob('rank-*.json'))
    told = [json.loads(path.read_text(encoding='utf-8')) for path in files]
    return sorted(told, key=lambda report: report['rank'])


def laggards(told: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """The ranks that met no error and did not get as far as any other: they hang or were ended."""
    silent = [report for report in told if report['error'] is None]
    least = min((report['count'] for report in silent), default=0)
    return [report for report in silent if report['count'] == least]
