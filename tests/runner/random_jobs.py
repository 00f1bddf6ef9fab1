"""What is drawn at random in the ranks of a job and in their worker processes."""

import os
import random

import numpy as np
import torch
from mmengine.config import Config
from mmengine.dataset import BaseDataset
from mmengine.registry import DATASETS, RUNNERS

from mmdevplug.accelerators import enter_rank_device
from tests.hooks.memory_jobs import config
from tests.jobs import install_card

SAMPLES = 60
CASES = [(seed, diff) for seed in (7, None) for diff in (False, True)]


@DATASETS.register_module(force=True)
class Draws(BaseDataset):
    """Samples that say their index and what three generators drew when they were loaded."""

    def load_data_list(self):
        return [dict(index=index) for index in range(SAMPLES)]

    def prepare_data(self, idx):
        drawn = [random.random(), float(np.random.rand()), torch.rand(1).item()]
        return dict(inputs=torch.tensor([self.get_data_info(idx)['index'], *drawn]).double())


def seeded_runner(work_dir, accelerator, seed, diff):
    """A runner whose data loader has workers."""
    cfg = config(os.path.join(work_dir, f'{seed}-{diff}'), accelerator)
    cfg['randomness'] = dict(seed=seed, diff_rank_seed=diff)
    cfg['train_dataloader'].update(
        num_workers=2,
        batch_size=4,
        sampler=dict(type='DefaultSampler', shuffle=True),
        dataset=dict(type='Draws'),
    )
    cfg['train_cfg'] = dict(by_epoch=True, max_epochs=1)
    cfg['log_level'] = 'WARNING'
    return RUNNERS.build(Config(cfg))


def draw(work_dir, accelerator):
    """For each of :data:`CASES` the seed, draws of all generators, and an epoch of samples."""
    install_card(accelerator)
    given = []
    if accelerator == 'zeta':
        # The stand-in has no generator of its own; what it is told is what counts.
        torch.zeta.manual_seed_all = given.append
    found = []
    for seed, diff in CASES:
        # As in a new process: a seed that nobody gave is drawn by NumPy, which was forked, or
        # seeded by the case before.
        np.random.seed()
        runner = seeded_runner(work_dir, accelerator, seed, diff)
        drawn = dict(
            python=random.random(),
            numpy=float(np.random.rand()),
            torch=torch.rand(1).item(),
            device=torch.rand(1, device=enter_rank_device()[1]).cpu().item(),
        )
        batches = [batch['inputs'] for batch in runner.train_loop.dataloader]
        found.append(
            dict(
                seed=runner.seed,
                told=given[-1] if given else None,
                drawn=drawn,
                samples=torch.cat(batches).tolist(),
            )
        )
    return found


def check(ranks):
    """Compare what all ranks have drawn.

    Args:
        ranks (list): What each rank's :func:`draw` returned.
    """
    for number, (seed, diff) in enumerate(CASES):
        here = [rank[number] for rank in ranks]
        seeds = [each['seed'] for each in here]
        first = seeds[0] if seed is None else seed
        assert seeds == [first + rank * diff for rank in range(len(ranks))]
        assert all(each['told'] in (None, each['seed']) for each in here)
        for generator in here[0]['drawn']:
            different = {each['drawn'][generator] for each in here}
            assert len(different) == (len(ranks) if diff else 1), (generator, seed, diff)
        samples = [sample for each in here for sample in each['samples']]
        indices = sorted(int(sample[0]) for sample in samples)
        assert indices == list(range(SAMPLES))  # each one once in all ranks together
        for column in (1, 2, 3):
            assert len({sample[column] for sample in samples}) == SAMPLES
    # Seeds that nobody gave are not the same twice.
    assert ranks[0][2]['drawn']['torch'] != ranks[0][3]['drawn']['torch']
