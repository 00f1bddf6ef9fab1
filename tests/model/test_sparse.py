"""Sparse gradients: as MMEngine's own wrapper trains them, and as one process does."""

import os

import pytest
import torch
from mmengine.model import BaseModel, MMDistributedDataParallel
from mmengine.optim import OptimWrapper, OptimWrapperDict
from torch import nn

from mmdevplug import DeviceDistributedDataParallel, DeviceRunner, init_device
from mmdevplug.errors import ModelError
from mmdevplug.optim import DeviceAmpOptimWrapper
from tests.jobs import install_card, torch_before
from tests.ranks import in_ranks

STEPS = 4


class Words(BaseModel):
    """An embedding and a bag of them with sparse gradients, and a layer with dense ones."""

    def __init__(self, unused=False):
        super().__init__()
        self.words = nn.Embedding(40, 4, sparse=True)
        self.bags = nn.EmbeddingBag(40, 4, mode='sum', sparse=True)
        self.head = nn.Linear(8, 3)
        if unused:
            self.unused = nn.Linear(2, 2)
        self.bad = False

    def forward(self, inputs, data_samples=None, mode='loss'):
        words = self.words(inputs).mean(1)
        if self.bad:
            words = words * float('nan')
        found = self.head(torch.cat([words, self.bags(inputs)], 1))
        return dict(loss=(found - 1).pow(2).mean())


def make(**options):
    torch.manual_seed(0)
    return Words(**options)


def batches(rank=0, world_size=1):
    """Of all ranks together always the same; a rank meets words that others do not."""
    random = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        whole = torch.randint(0, 40, (8, 3), generator=random)
        yield dict(inputs=whole.chunk(world_size)[rank])


def wrapper_of(name, model):
    if name == 'SparseAdam':
        sparse = [*model.words.parameters(), *model.bags.parameters()]
        return OptimWrapperDict(
            sparse=OptimWrapper(torch.optim.SparseAdam(sparse, 0.05)),
            dense=OptimWrapper(torch.optim.Adam(model.head.parameters(), 0.05)),
        )
    options = dict(momentum=0.9) if name == 'momentum' else {}
    cls = torch.optim.Adagrad if name == 'Adagrad' else torch.optim.SGD
    optimizer = cls([p for p in model.parameters() if p.requires_grad], 0.2, **options)
    if name == 'accumulation':
        return OptimWrapper(optimizer, accumulative_counts=2)
    if name == 'bfloat16':
        return DeviceAmpOptimWrapper(optimizer=optimizer, dtype='bfloat16')
    if name == 'float16':
        return DeviceAmpOptimWrapper(optimizer=optimizer, dtype='float16', loss_scale=64.0)
    return OptimWrapper(optimizer)


#: Name, optimizer, how close to one process, options of the wrapper.
SCENARIOS = {
    'plain': ('SGD', 1e-6, {}),
    'momentum': ('momentum', 1e-6, {}),
    'Adagrad': ('Adagrad', 1e-5, {}),
    'SparseAdam': ('SparseAdam', 1e-5, {}),
    'accumulation': ('accumulation', 1e-6, {}),
    'bfloat16': ('bfloat16', 1e-2, {}),
    'float16': ('float16', 1e-2, {}),
    'unused': ('SGD', 1e-6, dict(find_unused_parameters=True)),
    'ignore': ('SGD', 1e-6, dict(nonfinite_grads='ignore')),
    'bhalf': ('SGD', 1e-2, dict(grad_compression='bf16')),
    'copies': ('SGD', 1e-6, dict(gradient_as_bucket_view=False, bucket_cap_mb=1)),
}


def train(model, name, rank=0, world_size=1):
    optim_wrapper = wrapper_of(name, getattr(model, 'module', model))
    if isinstance(optim_wrapper, OptimWrapper):
        optim_wrapper.initialize_count_status(model, 0, STEPS)
    for data in batches(rank, world_size):
        if isinstance(optim_wrapper, OptimWrapperDict):
            # MMEngine's wrapper calls the loss, ours too; here the model defines its own steps.
            with optim_wrapper['dense'].optim_context(model):
                loss = model(**data, mode='loss')['loss']
            loss.backward()
            for each in optim_wrapper.values():
                each.step()
                each.zero_grad()
        else:
            model.train_step(data, optim_wrapper)
    return {k: v.detach().numpy() for k, v in getattr(model, 'module', model).named_parameters()}


def meet_nan(rank, world_size):
    model = DeviceDistributedDataParallel(make(), nonfinite_grads='stop')
    optim_wrapper = wrapper_of('SGD', model.module)
    for number, data in enumerate(batches(rank, world_size)):
        model.module.bad = number == 2 and rank == 1
        model.train_step(data, optim_wrapper)


def needed(name):
    if name == 'momentum' and torch_before('1.11.0'):
        return False  # its SGD does not add a sparse gradient to the momentum of an earlier one
    return name != 'float16' or hasattr(getattr(torch, 'amp', None), 'GradScaler')


@pytest.mark.parametrize('ranks', [1, 2])
@in_ranks()
def test_trains_as_one_process_does(ranks):
    rank = init_device('pytorch', 'cpu', timeout=60).env.rank
    for name, (optimizer, close, options) in SCENARIOS.items():
        if needed(name):
            model, alone = (make(unused=name == 'unused') for _ in range(2))
            wrapper = DeviceDistributedDataParallel(model, **options)
            found = train(wrapper, optimizer, rank, ranks)
            assert_close(found, train(alone, optimizer), close, name)
        if name == 'plain':
            stock = train(MMDistributedDataParallel(make()), 'SGD', rank, ranks)
            assert_close(found, stock, 1e-6, 'stock')
    if ranks > 1:
        with pytest.raises(ModelError) as raised:
            meet_nan(rank, ranks)
        # One rank met NaN, and both report where it was.
        assert 'rank 1: ' in str(raised.value)
        assert 'words.weight (' in str(raised.value)


def assert_close(found, reference, close, name):
    assert found.keys() == reference.keys()
    for key, value in reference.items():
        difference = abs(found[key] - value).max()
        assert difference <= close, (name, key, difference)


def train_on_device(accelerator, work_dir, frozen=False):
    install_card(accelerator)
    model = make()
    for name in ('words', 'bags'):
        getattr(model, name).weight.requires_grad = not frozen
    data = [torch.arange(3) for _ in range(4)]
    runner = DeviceRunner(
        model=model,
        work_dir=str(work_dir),
        train_cfg=dict(by_epoch=True, max_epochs=1),
        train_dataloader=dict(
            dataset=data, batch_size=2, sampler=dict(type='DefaultSampler'), collate_fn=collate
        ),
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.1)),
        launcher='pytorch' if 'RANK' in os.environ else 'none',
        accelerator=accelerator,
    )
    runner.train()


def collate(samples):
    return dict(inputs=torch.stack(samples))


@pytest.mark.parametrize(
    ('accelerator', 'ranks', 'reason'),
    [
        ('zeta', 0, 'no kernels'),
        ('zeta', 2, 'has no kernels for them on this device'),
        pytest.param('xla', 0, 'no kernels', marks=pytest.mark.xla),
        pytest.param('xla', 2, 'cannot average those of a lazy device', marks=pytest.mark.xla),
    ],
)
@in_ranks()
def test_refused_on_a_device_without_kernels(accelerator, ranks, reason, tmp_path):
    with pytest.raises(ModelError, match='sparse=True of words, bags') as raised:
        train_on_device(accelerator, tmp_path)
    assert reason in str(raised.value)


@in_ranks()
def test_frozen_weights_need_no_kernels(tmp_path):
    train_on_device('zeta', tmp_path, frozen=True)
