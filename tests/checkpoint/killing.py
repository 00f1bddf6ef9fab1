"""Runs whose processes are killed again and again, by a plan that a seed decides."""

import json
import os
import random
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import loops

from mmdevplug.checkpoint.reading import check_file, read_checkpoint
from mmdevplug.utils import atomic_files

# The pause of MMEngine's loop between two passes over the data.
loops.time = SimpleNamespace(sleep=lambda _: None)

#: Where a process may die: at the end of an iteration, or in the middle of saving.
PLACES = ('iteration', 'half written', 'written', 'flushed', 'renamed', 'pointed')


def make_plan(seed, kills, world_size, horizon):
    """Decide who is killed when.

    Returns:
        list: For each attempt ``dict(ranks, place, after)``; ``after`` counts iterations, or
        checkpoints for the places inside of saving.
    """
    chance = random.Random(seed)
    plan = []
    for number in range(kills):
        place = 'iteration' if chance.random() < 0.5 else chance.choice(PLACES[1:])
        everyone = chance.random() < 0.25
        ranks = list(range(world_size)) if everyone else [chance.randrange(world_size)]
        if place != 'iteration':
            ranks = sorted({0, *ranks}) if everyone else [0]  # rank 0 writes
        after = chance.randint(1, horizon if place == 'iteration' else max(1, horizon // 4))
        plan.append(dict(number=number, ranks=ranks, place=place, after=after))
    return plan


def make_terminations(seed, number, world_size, length):
    """Decide which rank gets SIGTERM after which iterations.

    Returns:
        dict: Rank by iteration; the keys are text, as JSON has them.
    """
    chance = random.Random(f'terminations {seed}')
    iterations = chance.sample(range(2, length - 8), number)
    return {str(iteration): chance.randrange(world_size) for iteration in iterations}


def _kill():
    os.kill(os.getpid(), signal.SIGKILL)


@HOOKS.register_module(force=True)
class KillByPlan(Hook):
    """Kills its own process as the plan says for this attempt, and looks at all checkpoints first.

    Args:
        plan (str): A JSON file with the list of :func:`make_plan`.
    """

    priority = 'LOWEST'

    def __init__(self, plan):
        self.folder = Path(plan).parent
        self.attempt = attempt = int(os.environ.get('TORCHELASTIC_RESTART_COUNT', 0))
        plans = json.loads(Path(plan).read_text())
        self.terminations = plans['terminations']
        self.plan = plans['kills'][attempt] if attempt < len(plans['kills']) else None
        self.iterations = 0

    def before_train(self, runner):
        if runner.rank == 0:
            look_at_checkpoints(runner.work_dir)
        if self.plan is None or runner.rank not in self.plan['ranks']:
            self.plan = None
        elif self.plan['place'] != 'iteration' and runner.rank == 0:
            die_while_saving(self.plan['place'], self.plan['after'], self.note)

    def note(self):
        with open(self.folder / 'kills.txt', 'a') as file:
            file.write(json.dumps(self.plan) + '\n')
            file.flush()
            os.fsync(file.fileno())

    def terminate(self, runner):
        """Send this process SIGTERM, once for each iteration in the plan that it has come to."""
        for iteration, rank in self.terminations.items():
            noted = self.folder / f'terminated_{iteration}_{self.attempt}'
            due = rank == runner.rank and runner.iter + 1 >= int(iteration)
            if due and not any(self.folder.glob(f'terminated_{iteration}_*')):
                noted.touch()
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.2)  # the others learn of it within a beat
                return

    def is_stopping(self):
        """Whether a rank was asked to stop and has not stopped yet: that comes before a kill."""
        # Those of an earlier attempt died with it, and one stop answers all that came before it.
        asked = self.folder.glob(f'terminated_*_{self.attempt}')
        stopped = self.folder / f'stopped_{self.attempt}'
        last = stopped.stat().st_mtime_ns if stopped.exists() else 0
        return any(path.stat().st_mtime_ns > last for path in asked)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if self.is_stopping():
            time.sleep(0.1)  # few iterations pass until all have agreed where to stop
            return
        self.iterations += 1
        self.terminate(runner)
        if self.plan is None:
            return
        others_follow = self.plan['place'] != 'iteration' and runner.rank != 0
        dies_here = self.plan['place'] == 'iteration' or others_follow
        if dies_here and self.iterations == self.plan['after']:
            if runner.rank == self.plan['ranks'][0] or others_follow:
                self.note()
            _kill()


def look_at_checkpoints(work_dir):
    """Read every checkpoint there is; one that cannot be read ends the run with an error."""
    paths = sorted(Path(work_dir).glob('*.pth'))
    for path in paths:
        check_file(path)
        read_checkpoint(str(path))
    with open(Path(work_dir) / 'looked.txt', 'a') as file:
        file.write(f'{len(paths)}\n')


def die_while_saving(place, after, note):
    """Kill this process inside the ``after``-th checkpoint that it writes from now on."""
    if hasattr(torch.save, 'dies'):
        return  # in this process another runner has trained before
    count = 0
    save, flush, replace = torch.save, atomic_files._flush, os.replace
    unfinished = '.pth' + atomic_files.UNFINISHED

    def die_if(here):
        if here and count >= after:
            note()
            _kill()

    def dying_save(value, path, *args, **kwargs):
        nonlocal count
        is_checkpoint = unfinished in str(path)
        count += is_checkpoint
        save(value, path, *args, **kwargs)
        if is_checkpoint and place == 'half written' and count >= after:
            path.flush()
            os.truncate(path.name, os.path.getsize(path.name) // 2)
        die_if(is_checkpoint and place in ('half written', 'written'))

    def dying_flush(path):
        flush(path)
        die_if(place == 'flushed' and unfinished in str(path))

    def dying_replace(source, target, *args, **kwargs):
        replace(source, target, *args, **kwargs)
        ending = dict(renamed='.pth', pointed='last_checkpoint').get(place)
        die_if(ending is not None and str(target).endswith(ending))

    dying_save.dies = True
    torch.save, atomic_files._flush, os.replace = dying_save, dying_flush, dying_replace
