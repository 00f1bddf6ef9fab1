"""A parameter without a gradient: an error within an iteration, with its name and the way out."""

import pytest
import torch
from mmengine.config import Config
from mmengine.model import BaseModel
from mmengine.registry import MODELS, RUNNERS
from torch import nn
from torch.utils.checkpoint import checkpoint

from mmdevplug.errors import ModelError
from mmdevplug.gradients import DeviceSeparateDistributedDataParallel
from mmdevplug.gradients.unused_parameters import refuse_unreduced
from tests.columns import NATIVE, job_of
from tests.features.parts import TinyGAN
from tests.hooks.memory_jobs import build, config
from tests.jobs import start, torch_before
from tests.ranks import RanksFailed, errors_of_ranks, in_ranks, run_ranks


@MODELS.register_module(force=True)
class Auxiliary(BaseModel):
    """A net with a head that some ranks leave out from some iteration on."""

    def __init__(self, left_out_on, since=1, width=8):
        super().__init__()
        self.net = nn.Linear(8, width)
        self.head, self.last = nn.Linear(width, width), nn.Linear(width, 1)
        self.left_out_on, self.since, self.calls = left_out_on, since, 0

    def forward(self, inputs, mode='tensor'):
        self.calls += 1
        hidden = self.net(inputs)
        losses = dict(loss=self.last(hidden).pow(2).mean())
        if torch.distributed.get_rank() not in self.left_out_on or self.calls < self.since:
            losses['loss_head'] = self.head(hidden).pow(2).mean()
        return losses


def train(work_dir, accelerator, model):
    runner = build(work_dir, accelerator, iterations=3, model=dict(model, type='Auxiliary'))
    runner.train()
    return runner.iter


@pytest.mark.parametrize('accelerator', ['cpu', NATIVE])
@in_ranks(2)
def test_parts_of_a_model_have_their_names(accelerator):
    """The child ``generator`` has a parameter that no loss depends on."""
    start(accelerator)
    model = TinyGAN()
    model.generator.register_parameter('spare', nn.Parameter(torch.ones(1)))
    wrapper = DeviceSeparateDistributedDataParallel(model)
    refuse_unreduced(wrapper)  # no backward pass yet
    generator = model.generator
    device = generator.module.spare.device
    generator(torch.ones(2, generator.module[0].in_features, device=device)).sum().backward()
    generator.requires_grad_(False)
    with pytest.raises(ModelError, match=r'generator\.spare\.'):
        refuse_unreduced(wrapper)
    with pytest.raises(ModelError, match='spare'):  # where nobody looks earlier
        generator.requires_grad_()(torch.ones(2, 1, device=device))


CASES = {
    'one rank': dict(left_out_on=[1]),
    'all ranks, later': dict(left_out_on=[0, 1], since=2),
    'one rank, in the last iteration': dict(left_out_on=[0], since=3),
    'gradients in shared memory': dict(left_out_on=[1], width=2048),
}


@pytest.mark.parametrize(
    ('accelerator', 'case'),
    [
        *(('cpu', case) for case in CASES),
        (NATIVE, 'one rank'),
        pytest.param('cuda', 'one rank', marks=pytest.mark.cuda),
    ],
)
def test_the_error_names_the_parameters_and_the_option(tmp_path, accelerator, case):
    model = CASES[case]
    job = dict(job_of(accelerator), together=model['left_out_on'] == [0, 1])
    errors = errors_of_ranks(train, 2, tmp_path, accelerator, model, **job)
    for rank, (kind, message) in errors.items():
        blamed = rank if rank in model['left_out_on'] else 1 - rank
        assert kind == ('ModelError' if blamed == rank else 'RankFailedError')
        expected = f'parameters without a gradient on rank {blamed}: head.weight, head.bias. '
        assert expected in message.splitlines()[0]
        assert 'set find_unused_parameters=True, in model_wrapper_cfg' in message
    assert set(model['left_out_on']) <= set(errors)


@MODELS.register_module(force=True)
class Tables(BaseModel):
    """Two sparse embeddings, of which one is used, and a layer that two checkpoints share."""

    def __init__(self, sparse, reentrant):
        super().__init__()
        self.used, self.idle = (nn.Embedding(9, 8, sparse=sparse) for _ in range(2))
        self.shared, self.reentrant = nn.Linear(8, 8), reentrant

    def forward(self, inputs, mode='tensor'):
        hidden = self.used(inputs.argmax(1))
        for _ in range(2):
            hidden = checkpoint(self.shared, hidden, use_reentrant=self.reentrant)
        return dict(loss=hidden.pow(2).mean())


def train_tables(work_dir, accelerator, model, wrapper):
    cfg = config(work_dir, accelerator, iterations=3, model=dict(model, type='Tables'))
    cfg['model_wrapper_cfg'] = dict(type='MMDistributedDataParallel', **wrapper)
    runner = RUNNERS.build(Config(cfg))
    runner.train()
    return runner.iter


@pytest.mark.skipif(
    torch_before('1.11.0'), reason='PyTorch 1.10 has neither use_reentrant nor static_graph'
)
@pytest.mark.parametrize(
    ('model', 'wrapper', 'expected'),
    [
        (dict(sparse=True, reentrant=False), dict(find_unused_parameters=True),
         r'sparse gradient is missing.*idle\.weight.*sparse=False'),
        (dict(sparse=False, reentrant=True), dict(find_unused_parameters=True),
         r'shared\.(bias|weight) got its gradient twice.*static_graph=True'),
        (dict(sparse=False, reentrant=True), dict(static_graph=True), None),
    ],
)  # fmt: skip
def test_sparse_and_shared_parameters_are_named(tmp_path, model, wrapper, expected):
    if expected is None:
        assert run_ranks(train_tables, 2, tmp_path, 'cpu', model, wrapper) == [3, 3]
        return
    with pytest.raises(RanksFailed, match=expected):
        run_ranks(train_tables, 2, tmp_path, 'cpu', model, wrapper)
