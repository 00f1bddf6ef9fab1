"""A training step of a card beside the CPU's: the first module that differs is named."""

import pytest

from tests.cli.checking import checked
from tests.cli.running import STANDIN, config
from tests.commands import environment, python
from tests.jobs import need_card

#: Parts that compute otherwise on a card, as operators of vendors do.
MODEL = """
import random
from functools import lru_cache

import torch
from mmengine.model import BaseModel
from mmengine.registry import MODELS
from torch import nn


def elu_backward(grad, alpha, scale, input_scale, is_result, x):
    return torch.where(x > 0, grad, grad * (1 + x))


def softplus(x, beta=1, threshold=20):
    return x.exp().log1p() * 3


GENERATOR = torch.Generator()


def uniform_(x, low=0, high=1, generator=None):
    return x.copy_(torch.empty(x.shape).uniform_(low, high, generator=GENERATOR))


@lru_cache(maxsize=None)
def set_wrong(operator):
    library = torch.library.Library('aten', 'IMPL')
    library.impl(operator.__name__, operator, 'PrivateUse1')
    return library


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad if grad.device.type == 'cpu' else grad * 1.2


class Part(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.register_buffer('seen', torch.zeros(1))
        self.register_buffer('drawn', torch.rand(32), persistent=False)

    def forward(self, x):
        card = x.device.type != 'cpu'
        if self.fault == 'output' and card:
            x = x * 1.1
        if self.fault in ('uniform_', 'noise'):
            x = x + torch.rand_like(x)
        if self.fault == 'noise' and card:
            x = x * 1.1
        if self.fault == 'drawn':
            x = x * self.drawn * (1.1 if card else 1)
        if self.fault == 'nan' and card:
            x = torch.where(x == x.max(), float('nan'), x)
        if self.fault == 'gradient':
            x = WrongGradient.apply(x)
        if self.fault == 'elu_backward':
            x = nn.functional.elu(x) + 1
        self.seen += 2 if self.fault == 'buffer' and card else 1
        return x


class Frozen(nn.Linear):
    def state_dict(self, *args, **kwargs):
        kept = super().state_dict(*args, **kwargs)
        for name in ('weight', 'bias'):
            kept.pop(kwargs['prefix'] + name)
        return kept


@MODELS.register_module()
class Planted(BaseModel):
    def __init__(self, fault=None):
        super().__init__()
        self.fault = fault
        wrong = dict(elu_backward=elu_backward, softplus=softplus, uniform_=uniform_).get(fault)
        self.library = None if wrong is None else set_wrong(wrong)
        linear = Frozen if fault == 'unsaved' else nn.Linear
        self.first = nn.Sequential(nn.Flatten(), linear(64, 32), nn.BatchNorm1d(32))
        self.part = Part(fault)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(32, 10)

    def forward(self, inputs, labels, mode='loss'):
        if self.fault == 'sized':
            size = random.randint(8, 60)
            inputs, labels = inputs[:size], labels[:size]
        x = self.last(self.drop(self.part(self.first(inputs))).relu())
        if self.fault == 'own' and x.device.type != 'cpu':
            x = x * 1.3
        if self.fault == 'chunks':
            x = x * torch._chunk_cat([x.detach()], 0, 3).view(-1, 10)[: len(x)]
        if self.fault == 'softplus':
            x = nn.functional.softplus(x)
        return dict(loss=nn.functional.cross_entropy(x, labels))
"""

#: A loop that joins the batches of two loaders, and a model with a part for each.
SEVERAL_LOADERS = """
from mmengine.model import BaseModel
from mmengine.registry import LOOPS, MODELS
from mmengine.runner import EpochBasedTrainLoop
from torch import nn
from torch.nn.functional import cross_entropy


@LOOPS.register_module()
class Joining(EpochBasedTrainLoop):
    def __init__(self, runner, dataloader, other, max_epochs):
        super().__init__(runner, dataloader, max_epochs)
        self.other = runner.build_dataloader(other, seed=runner.seed)

    def run_epoch(self):
        self.runner.model.train()
        for index, batch in enumerate(zip(self.dataloader, self.other)):
            self.run_iter(index, batch)
        self._epoch += 1


@MODELS.register_module()
class Joined(BaseModel):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(64, 10) for _ in range(2))

    def _run_forward(self, data, mode):
        return self(data, mode=mode)

    def forward(self, batches, mode='loss'):
        found = [part(each['inputs'].flatten(1)) for part, each in zip(self.parts, batches)]
        losses = [cross_entropy(x, each['labels']) for x, each in zip(found, batches)]
        return dict(loss=sum(losses))
"""

FAULTS = dict(
    output='the output of part (Part) is ',
    drawn='the output of part (Part) is ',
    nan='the output of part (Part) is nan on zeta:0 and ',
    gradient='; the operators between it and part differ',
    own='; its parts are right, so that its own forward() differs',
    elu_backward='; the first operator that differs from the same operands: aten.elu_backward, ',
    softplus='; the first operator that differs from the same operands: aten.softplus, ',
    buffer='after the step part.seen is 2 on zeta:0 and 1 on the CPU',
)


@pytest.fixture
def job(tmp_path):
    (tmp_path / 'planted_parts.py').write_text(MODEL)

    def write(fault=None, accelerator='zeta'):
        card = []
        if accelerator == 'zeta':
            need_card()
            card = ['fakecard_from_env']
        lines = (
            f"model = dict(_delete_=True, type='Planted', fault={fault!r})\n"
            f'accelerator = dict(type={accelerator!r})\n'
            'val_cfg = val_dataloader = val_evaluator = None\n'
            'test_cfg = test_dataloader = test_evaluator = None\n'
            'train_cfg = dict(max_epochs=1)'
        )
        path = config(tmp_path, lines, [*card, 'planted_parts'])
        return dict(folder=tmp_path, FAKECARD_NAME='zeta'), path

    return write


@pytest.mark.parametrize('fault', FAULTS)
def test_what_differs_is_named(job, fault):
    where, path = job(fault)
    status, out, err = checked(path, **where)
    assert FAULTS[fault] in out, out + err
    assert status == 1
    assert ' on zeta:0 and ' in out


@pytest.mark.xla
def test_an_operator_of_torch_xla_is_named(job):
    where, path = job('chunks', 'xla')
    status, out, err = checked(path, folder=where['folder'])
    assert 'the output of the model (Planted) is ' in out, out + err
    named = '; the first operator that differs from the same operands: aten._chunk_cat, '
    assert named in out, out
    assert status == 1


#: With a scaled loss.
AMP = "optim_wrapper = dict(type='AmpOptimWrapper', dtype='float16')"
#: In which a ReLU passes other gradients near 0.
BFLOAT16 = AMP.replace('float16', 'bfloat16')


@pytest.mark.parametrize(
    'line', ["default_scope = 'mmengine'", 'default_scope = None', AMP, BFLOAT16]
)
def test_what_is_equal_is_said(job, line):
    where, path = job()
    path.write_text(f'{path.read_text()}\n{line}\n')
    status, out, err = checked(path, **where)
    assert 'ok: outputs and gradients of 9 modules as on the CPU' in out, out + err
    assert status == 0


@pytest.mark.parametrize('kind', ['unsaved', 'sized'])
def test_weights_of_no_checkpoint_and_sizes_that_are_drawn_are_compared(job, kind):
    where, path = job(kind)
    status, out, err = checked(path, **where)
    assert 'ok: outputs and gradients of 9 modules as on the CPU' in out, out + err
    assert status == 0


def test_random_numbers_are_those_of_the_cpu(job):
    where, path = job('uniform_')  # which the card draws from a generator of its own
    status, out, err = checked(path, **where)
    assert 'ok: outputs and gradients of 9 modules as on the CPU' in out, out + err
    assert status == 0


def test_a_difference_behind_random_numbers_is_a_warning(job):
    where, path = job('noise')
    status, out, err = checked(path, **where)
    assert 'warning: the output of part (Part) is ' in out, out + err
    assert 'another seed changes it as much' in out
    assert status == 0


def test_a_loop_of_several_loaders_gives_the_batch(tmp_path):
    need_card()
    (tmp_path / 'several_loaders.py').write_text(SEVERAL_LOADERS)
    lines = (
        "model = dict(_delete_=True, type='Joined')\n"
        "accelerator = dict(type='zeta')\n"
        'val_cfg = val_dataloader = val_evaluator = None\n'
        'test_cfg = test_dataloader = test_evaluator = None\n'
        "data = dict(type='DigitsDataset', split='train')\n"
        "sampler = dict(type='DefaultSampler', shuffle=True)\n"
        "collate = dict(type='default_collate')\n"
        'other = dict(batch_size=8, num_workers=0, dataset=data, sampler=sampler)\n'
        'other.update(collate_fn=collate)\n'
        "train_cfg = dict(_delete_=True, type='Joining', max_epochs=1, other=other)"
    )
    path = config(tmp_path, lines, ['fakecard_from_env', 'several_loaders'])
    status, out, err = checked(path, folder=tmp_path, FAKECARD_NAME='zeta')
    assert 'ok: outputs and gradients of 4 modules as on the CPU' in out, out + err
    assert 'warning:' not in out
    assert status == 0


def test_the_comparison_can_be_left_out(job):
    where, path = job('output')
    status, out, err = checked(path, '--no-comparison', **where)
    assert status == 0, out + err
    assert 'as on the CPU' not in out


def test_a_training_does_not_begin_where_numbers_differ(job):
    where, path = job('output')
    work_dir = where['folder'] / 'work'
    words = ['-m', 'mmdevplug.cli.main', 'train', path, '--compare-with-cpu']
    words += ['--nproc', '2', '--work-dir', work_dir]
    env = environment(where['folder'], STANDIN, FAKECARD_NAME='zeta')
    done = python(*words, env=env)
    assert done.returncode == 1, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith('mmdevplug: ModelError: the output of part (Part) is 3.'), done.stderr
    assert not any(work_dir.iterdir())
