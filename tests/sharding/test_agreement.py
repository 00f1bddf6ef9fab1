"""Sharded steps in which ranks differ: in the blocks they call, in batches, in NaN."""

import pytest
import torch
from mmengine.registry import DATASETS, MODELS

from mmdevplug.errors import DevPlugError
from tests.parallel_jobs import SpreadImages
from tests.ranks import run_ranks

from .jobs import ShardedTwice, build, train
from .test_training import pytestmark  # noqa: F401


@MODELS.register_module()
class ShardedByRank(ShardedTwice):
    """Ranks call other blocks, or some of them twice; or gradients of one are NaN."""

    def __init__(self, fault, when=True, **kwargs):
        super().__init__(**kwargs)
        self.fault, self.when = fault, when

    def forward(self, inputs, labels, mode='tensor'):
        rank = torch.distributed.get_rank()
        x = self.stem(inputs.flatten(1))
        order = [0, 1, 2, 3]
        if self.training == self.when and rank == 1:
            order = dict(other=[0, 0, 2, 3], fewer=[0, 2, 3], more=[0, 1, 1, 2, 3]).get(
                self.fault, order
            )
        for number in order:
            x = self.blocks[number](x)
        loss = self.head(x).square().mean()
        if self.fault == 'nan' and rank == 1:
            loss = loss * float('nan')
        return dict(loss=self.scale.sum() * loss) if mode == 'loss' else self.head(x).argmax(1)


def refuse(work_dir, fault, when):
    try:
        runner = build(
            'twice',
            'cpu',
            work_dir,
            sharding=True,
            default_scope='mmengine',
            model=dict(type='ShardedByRank', fault=fault, when=when),
        )
        if when:
            runner.train()
        else:
            runner.model.eval()
            with torch.no_grad():
                runner.model.test_step((torch.ones(2, 3, 8, 8), torch.zeros(2, dtype=torch.long)))
    except DevPlugError as error:
        return str(error)
    return ''


@pytest.mark.parametrize('when', [True, False])
@pytest.mark.parametrize(
    ('fault', 'places'),
    [
        ('other', 'rank 0 is at blocks.1; rank 1 is at blocks.0'),
        ('fewer', 'rank 0 is at blocks.1; rank 1 is at the end of its step'),
        ('more', 'rank 0 is at the end of its step; rank 1 is at blocks.1'),
    ],
)
def test_ranks_at_different_blocks_are_refused_before_they_wait(tmp_path, fault, places, when):
    said = run_ranks(refuse, 2, str(tmp_path), fault, when, together=True)
    if when:  # a step calls the model twice
        places = places.replace('the end of its step', 'the model')
    assert any(places in each for each in said), said
    assert all(said)


def test_nan_stops_the_training_as_data_parallel_training_stops(tmp_path):
    for said in run_ranks(refuse, 2, str(tmp_path), 'nan', True, together=True):
        assert 'gradients are not finite' in said
        assert 'NaN' in said
        assert 'nonfinite_grads' not in said  # an option of the wrapper, which there is not


@DATASETS.register_module()
class OddImages(SpreadImages):
    def __len__(self):
        return 9


def validate_unevenly(work_dir):
    loader = dict(
        batch_size=2,
        num_workers=0,
        sampler=dict(type='DefaultSampler', shuffle=False, round_up=False),
        dataset=dict(type='OddImages'),
        collate_fn=dict(type='default_collate'),
    )
    try:
        train(
            'twice',
            'cpu',
            work_dir,
            sharding=True,
            val_dataloader=loader,
            val_cfg=dict(),
            val_evaluator=dict(type='DumpResults', out_file_path=f'{work_dir}/a.pkl'),
        )
    except DevPlugError as error:
        return str(error)
    return ''


def test_uneven_validation_is_refused_at_the_start(tmp_path):
    said = run_ranks(validate_unevenly, 2, str(tmp_path), together=True)
    assert any('val_dataloader: ranks have different numbers of batches' in one for one in said)
    assert any('round_up=True' in one for one in said)
