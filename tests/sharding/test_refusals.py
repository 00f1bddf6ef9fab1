"""What cannot be sharded is refused with the reason and the way out."""

import pytest
import torch
from mmengine.model import BaseModel
from mmengine.registry import MODELS
from torch import nn

from mmdevplug.config.sharding import ShardingOptions
from mmdevplug.errors import DevPlugError, ModelError
from mmdevplug.sharding.find_blocks import find_blocks
from tests.columns import lazy
from tests.parallel_jobs import build
from tests.ranks import RanksFailed, in_ranks, run_ranks

from . import jobs
from .jobs import train
from .test_training import needs_card, pytestmark  # noqa: F401


@MODELS.register_module()
class ShardedOddly(BaseModel):
    """A parameter without a dimension, or heads of which each rank uses another."""

    def __init__(self, scalar=False, data_preprocessor=None):
        super().__init__(data_preprocessor)
        self.scale = nn.Parameter(torch.ones(()) if scalar else torch.ones(1))
        self.heads = nn.ModuleList(nn.Linear(3 * 8 * 8, 4) for _ in range(2))

    def forward(self, inputs, labels, mode='tensor'):
        rank = torch.distributed.get_rank()
        return dict(loss=(self.scale * self.heads[rank](inputs.flatten(1))).square().mean())


class Holder:
    """An object of a model that has a tensor."""

    def __init__(self, value):
        self.value = value


@MODELS.register_module()
class ShardedMistaken(BaseModel):
    """Blocks, and something that sharding cannot obey."""

    def __init__(self, fault, data_preprocessor=None):
        super().__init__(data_preprocessor)
        self.fault, self.stem = fault, nn.Linear(3 * 8 * 8, 8)
        self.blocks = nn.ModuleList(jobs.ShardedBlock(8) for _ in range(3))
        self.hidden = Holder(self.stem.bias.detach() * 2)
        if fault == 'accumulated':
            self.stem.weight.register_post_accumulate_grad_hook(lambda p: p.grad.zero_())

    def init_weights(self):
        if self.fault == 'late hook':
            self.blocks[0].register_forward_hook(lambda *_: None)
        if self.fault == 'late hook of a weight':
            self.stem.weight.register_hook(torch.zeros_like)

    def forward(self, inputs, labels, mode='tensor'):
        weight = self.blocks[1].first.weight
        x = self.stem(inputs.flatten(1))
        if self.fault == 'data':
            weight.data = weight.data * 0.5
        if self.fault == 'vector':
            length = weight.numel()
            nn.utils.vector_to_parameters(torch.zeros(length), [weight])
        if self.fault == 'object':
            x = x + self.hidden.value
        for block in self.blocks:
            x = block(x)
        loss = x.square().mean()
        if self.fault == 'penalty':
            loss = loss + sum(each.square().sum() for each in self.parameters())
        return dict(loss=loss)


def mistaken(fault):
    return dict(model=dict(_delete_=True, type='ShardedMistaken', fault=fault))


CASES = dict(
    model_parallel=(dict(model_parallel=dict(enable=None)), 'model_parallel: each arranges'),
    wrapper=(
        dict(model_wrapper_cfg=dict(type='MMDistributedDataParallel')),
        'model_wrapper_cfg: each arranges',
    ),
    ema=(
        dict(sharding=dict(sharded_checkpoint=True), custom_hooks=[dict(type='EMAHook')]),
        "sharded_checkpoint and ['EMAHook']",
    ),
    ranks=(dict(sharding=dict(ranks=3)), 'a divisor of 2'),
    published=(
        dict(
            sharding=dict(sharded_checkpoint=True),
            default_hooks__checkpoint__published_keys=['state_dict'],
        ),
        'published_keys',
    ),
    blocks=(dict(sharding=dict(blocks=['Blok'])), "'Blok'], which is neither a class"),
    not_called=(
        dict(
            sharding=dict(blocks=['FCNHead']),
            model=dict(jobs.vit(), _delete_=True),
            train_dataloader__dataset__type='SpreadScenes',
            train_dataloader__collate_fn__type='pseudo_collate',
            default_scope='mmseg',
        ),
        'name in sharding.blocks a part that a step calls by itself',
    ),
    scalar=(dict(model=dict(_delete_=True, type='ShardedOddly', scalar=True)), 'no dimension'),
    gradients=(
        dict(model=dict(_delete_=True, type='ShardedOddly')),
        'without gradients of heads.1.weight, heads.1.bias; rank 1 is after',
    ),
    accumulated=(mistaken('accumulated'), 'stem.weight has a hook'),
    late_hook=(mistaken('late hook'), 'init_weights registers hooks'),
    late_weight=(mistaken('late hook of a weight'), 'init_weights registers hooks'),
    data=(mistaken('data'), 'assigned to the .data of blocks.1.first.weight'),
    vector=(mistaken('vector'), 'assigned to the .data of blocks.1.first.weight'),
    penalty=(mistaken('penalty'), 'set weight_decay of the optimizer'),
)


def refusal(accelerator, work_dir, **options):
    """What this rank says of a training that is refused."""
    with pytest.raises(DevPlugError) as raised:
        train('twice', accelerator, work_dir, **dict(dict(sharding=True), **options))
    return str(raised.value)


def with_marks(name):
    return pytest.param(name, marks=pytest.mark.operators if name == 'not_called' else ())


@pytest.mark.parametrize('name', map(with_marks, CASES))
@in_ranks(2, together=True)
def test_what_cannot_be_sharded_is_refused(name, tmp_path):
    options, expected = CASES[name]
    said = refusal('cpu', tmp_path, **options)
    assert 'sharding' in said
    assert expected in said


def refuse_and_write(path):
    said = refusal('cpu', path, **mistaken('object'))
    with open(f'{path}/said by rank 1', 'w') as file:
        file.write(said)


def test_a_tensor_that_other_ranks_do_not_have_is_named(tmp_path):
    with pytest.raises(RanksFailed):  # the first rank has it, and is ended
        run_ranks(refuse_and_write, 2, str(tmp_path))
    said = (tmp_path / 'said by rank 1').read_text()
    assert 'Make it a buffer, self.register_buffer(...)' in said
    assert 'x = x + self.hidden.value' in said


@pytest.mark.parametrize(
    ('accelerator', 'reason'),
    [
        lazy('lazy', 'those of a lazy device have no memory before a graph runs'),
        pytest.param('zeta', 'needs torch.zeta.Stream', marks=needs_card),
    ],
)
@in_ranks(2, together=True)
def test_devices_are_refused_with_the_reason(accelerator, reason, tmp_path):
    assert reason in refusal(accelerator, tmp_path)


@in_ranks(2, together=True)
def test_a_step_that_calls_parts_of_the_model_is_refused(tmp_path):
    runner = build('twice', 'cpu', tmp_path, sharding=True, default_scope='mmengine')
    type(runner.model).test_step = lambda self, data: self.head(data)
    expected = 'name in sharding.blocks a part that a step calls by itself'
    with pytest.raises(ModelError, match=expected):
        runner.model.test_step(torch.ones(1, 24))


@in_ranks()
def test_one_process_trains_without_sharding(tmp_path):
    train('twice', 'cpu', tmp_path, sharding=True)


@pytest.mark.parametrize(
    ('value', 'said'),
    [
        ('yes', 'expected True, False or a dict'),
        (dict(rank=2), "did you mean 'ranks'"),
        (dict(mixed_precision='fp16'), "expected 'bf16'"),
        (dict(blocks='Block'), 'a list of names'),
    ],
)
def test_impossible_options_are_refused(value, said):
    with pytest.raises(ModelError, match=said.replace('(', r'\(')):
        ShardingOptions.from_config(value)


def test_a_block_that_shares_a_weight_stays_with_the_rest():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

    blocks = nn.ModuleList(Block() for _ in range(3))
    model = nn.ModuleDict(dict(blocks=blocks, head=nn.Linear(4, 4)))
    assert find_blocks(model) == ['blocks.0', 'blocks.1', 'blocks.2']
    model['head'].weight = model['blocks'][1].inner.weight
    assert find_blocks(model) == ['blocks.0', 'blocks.2']
    assert find_blocks(model, ['head']) == []
