"""tools/check.py, as a user runs it."""

import os

import pytest
import torch
from mmengine.optim import OptimWrapper
from mmengine.structures import InstanceData
from torch import nn

from mmdevplug.checks.one_step import _apart, _built
from tests.cli.checking import checked
from tests.cli.running import AUTO, CONFIG, config
from tests.commands import environment, python
from tests.jobs import ROOT, digits_config, need_card, needs_modes
from tests.ranks import in_ranks

#: A model whose last part does what a line says, with a tensor that is made on a device.
PLANTED = """
import torch
from mmengine.model import BaseModel
from mmengine.registry import MODELS
from torch import nn


class Sum(nn.Module):
    def forward(self, one, other):
        {line}


@MODELS.register_module()
class Planted(BaseModel):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 10)
        self.add = Sum()

    def forward(self, inputs, labels, mode='loss'):
        one = self.first(inputs.flatten(1))
        other = torch.ones(10, device={device!r})
        return dict(loss=self.add(one, other).square().mean())
"""
NUMBER = 1 + PLANTED.splitlines().index('        {line}')
WITH_PLANTED = "model = dict(_delete_=True, type='Planted')\n"

SPARE_HEAD = """
from mmengine.registry import MODELS
from torch import nn
from mmdevplug.examples.digits import DigitsClassifier

@MODELS.register_module()
class WithSpareHead(DigitsClassifier):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.spare = nn.Linear(2, 2)
"""

READS_LENGTH = """
from mmengine.logging import MessageHub
from mmengine.registry import MODELS
from mmdevplug.examples.digits import DigitsClassifier


@MODELS.register_module()
class ReadsLength(DigitsClassifier):
    def train_step(self, data, optim_wrapper):
        info = MessageHub.get_current_instance().runtime_info
        assert 0 == info['epoch'] == info['iter'] < info['max_epochs'] < info['max_iters']
        return super().train_step(data, optim_wrapper)
"""


class WithKeywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = nn.Linear(2, 2)

    def forward(self, sample, *, mask=None):
        return dict(scores=self.part(sample.points) * mask, sample=sample)


def one_step(model, **optimizer):
    wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1, **optimizer))
    sample = InstanceData(points=torch.ones(3, 2))
    wrapper.update_params(model(sample, mask=torch.ones(2))['scores'].sum())
    return model, wrapper


def test_what_is_apart_is_a_problem():
    model, wrapper = one_step(WithKeywords(), momentum=0.9)
    assert list(_apart(model, wrapper)) == []
    (state, _) = wrapper.optimizer.state.values()
    state['momentum_buffer'] = state['momentum_buffer'].to('meta')
    apart = 'part.weight is on cpu, but its optimizer state on meta'
    assert list(_apart(model, wrapper)) == [apart]
    model.part.register_buffer('mean', torch.ones(2, device='meta'))
    assert next(_apart(model, wrapper)) == 'part has tensors of its own on cpu, meta'


@pytest.fixture(scope='module')
def digits():
    """As a user runs it, in a shell with variables of an earlier job."""
    before = sorted(os.listdir(ROOT)), sorted(os.listdir(ROOT / 'configs' / 'digits'))
    env = environment(RANK='3', MASTER_PORT='29500')
    done = python('tools/check.py', CONFIG, env=env)
    assert before == (sorted(os.listdir(ROOT)), sorted(os.listdir(ROOT / 'configs' / 'digits')))
    return done


@needs_modes
def test_a_consistent_step(digits):
    assert digits.returncode == 0, digits.stderr
    assert digits.stdout.splitlines()[-1] == 'consistent: one training step on cpu'


@needs_modes
def test_a_parameter_without_a_gradient_is_a_warning(tmp_path):
    (tmp_path / 'spare_head.py').write_text(SPARE_HEAD)
    path = config(tmp_path, "model = dict(type='WithSpareHead')", ['spare_head'])
    status, out, _ = checked(path, folder=tmp_path)
    (line,) = [line for line in out.splitlines() if line.startswith('warning:')]
    assert 'one training step: spare.weight, spare.bias. A job of several ranks would stop' in line
    assert 'set find_unused_parameters=True' in line
    assert status in (None, 0)
    _, out, _ = checked(path, '--cfg-options', 'find_unused_parameters=True', folder=tmp_path)
    assert 'warning:' not in out


@needs_modes
def test_a_model_may_read_the_length_of_the_training(tmp_path):
    (tmp_path / 'reads_length.py').write_text(READS_LENGTH)
    path = config(tmp_path, "model = dict(type='ReadsLength')", ['reads_length'])
    status, out, err = checked(path, folder=tmp_path)
    assert status in (None, 0), out + err
    assert out.splitlines()[-1] == 'consistent: one training step on cpu'


BY_ITERATION = "_delete_=True, type='IterBasedTrainLoop', max_iters=3"


def with_data(folder, loop, data, more=''):
    lines = f'train_cfg = dict({loop})\ntrain_dataloader = dict({data})\n{more}'
    return config(folder, lines)


@needs_modes
@pytest.mark.parametrize('loop', [BY_ITERATION, ''])
def test_a_sampler_without_end_is_read_once(tmp_path, loop):
    data = "num_workers=1, persistent_workers=True, sampler=dict(type='InfiniteSampler')"
    status, out, err = checked(with_data(tmp_path, loop, data))
    assert status in (None, 0), out + err
    assert out.splitlines()[-1] == 'consistent: one training step on cpu'


@pytest.mark.parametrize('loop', [BY_ITERATION, ''])
def test_data_without_a_batch(tmp_path, loop):
    data = 'dataset=dict(indices=20)'
    status, out, err = checked(with_data(tmp_path, loop, data, 'param_scheduler = None'))
    assert status == 1
    assert 'train_dataloader has no batch in an epoch: DigitsDataset(indices=20) has 20' in err
    assert 'batch_size=64 and drop_last=True' in err


def test_a_validation_that_fails_is_an_error(tmp_path):
    lines = (
        "val_dataloader = dict(dataset=dict(metainfo=dict(classes=['a'])))\n"
        "val_evaluator = dict(_delete_=True, type='DumpProxyMetric')"
    )
    (tmp_path / 'wrong_metric.py').write_text(
        'from mmengine.evaluator import BaseMetric\n'
        'from mmengine.registry import METRICS\n'
        '@METRICS.register_module()\n'
        'class DumpProxyMetric(BaseMetric):\n'
        "    def process(self, batch, samples): samples[0]['pred_sem_seg']\n"
        '    def compute_metrics(self, results): return {}\n'
    )
    path = config(tmp_path, lines, ['wrong_metric'])
    status, out, err = checked(path, folder=tmp_path)
    assert status == 1, err
    assert 'the validation step fails with' in out
    assert 'pred_sem_seg' in out


def test_launch_variables_and_strategies_are_told(digits):
    (stale,) = [line for line in digits.stdout.splitlines() if 'left over' in line]
    assert 'RANK=3 MASTER_PORT=29500' in stale
    assert stale.endswith('do: unset RANK MASTER_PORT')
    # Of an option that is not in the config.
    assert 'model_parallel' not in digits.stdout
    status, out, err = checked(CONFIG, '--model-parallel', 'auto', '--no-comparison')
    assert status == 0, err
    lines = [line for line in out.splitlines() if 'model_parallel.enable=' in line[:25]]
    assert len(lines) == 3
    for word, line in zip(['true', 'false', 'auto'], lines):
        assert line.startswith('* ' if word == 'auto' else '  ')
        told = 'refused: ' if word == 'true' else 'single_device on cpu: '
        assert line[2:].startswith(f'model_parallel.enable={word:6}{told}')
    assert 'needs two or more devices' in lines[0]


@pytest.fixture
def planted(tmp_path):
    need_card()

    def write(cure=''):
        text = PLANTED.format(line=f'return one + other{cure}', device='zeta:1')
        (tmp_path / 'planted_model.py').write_text(text)
        lines = (
            f'{WITH_PLANTED}val_dataloader = val_cfg = val_evaluator = None\n'
            "accelerator = dict(type='zeta')"
        )
        path = config(tmp_path, lines, ['fakecard_from_env', 'planted_model'], base=AUTO)
        return dict(folder=tmp_path, FAKECARD_NAME='zeta'), path

    return write


def test_a_planted_mismatch_is_named(planted):
    options, path = planted()
    status, out, err = checked(path, **options)
    assert status == 1, err
    for told in ('operands on zeta:0, zeta:1', 'in: add (Sum)', f'planted_model.py:{NUMBER}: '):
        assert told in out
    assert out.splitlines()[-1].startswith('NOT consistent: 1 problem(s)')


@pytest.mark.parametrize(('guard', 'expected'), [('warn', 1), ('move', 0)])
def test_other_policies_for_a_planted_mismatch(planted, guard, expected):
    options, path = planted()
    status, out, _ = checked(path, '--guard', guard, **options)
    assert status == expected, out
    assert '1 operation(s) at 1 place(s) had operands on different devices' in out
    # With a warning the card itself refuses to add, as it would in a training.
    assert ('RuntimeError' in out) == (guard == 'warn')


def test_the_same_without_the_mismatch(planted):
    options, path = planted('.to(one.device)')
    status, out, err = checked(path, **options)
    assert status == 0, out + err
    assert 'different devices' not in out


def test_a_buffer_that_leaves_its_device_in_a_step_is_named(planted):
    options, path = planted('.to(one.device)')
    file = options['folder'] / 'planted_model.py'
    text = file.read_text().replace(
        'self.add = Sum()', "self.add = Sum()\n        self.register_buffer('mean', torch.ones(3))"
    )
    file.write_text(text.replace('one = self', 'self.mean = self.mean.cpu()\n        one = self'))
    status, out, err = checked(path, **options)
    assert status == 1, out + err
    assert 'not on zeta:0: mean on cpu' in out


@needs_modes
@pytest.mark.parametrize(
    ('line', 'told'),
    [
        ("return one + torch.ones(10, device='meta')", 'got operands on cpu, meta'),
        ("return one * torch.ones(1, device='meta').item()", 'the step fails with RuntimeError'),
        ("return one + torch.ones(10, device='meta').to('cpu')", 'the step fails with NotImpl'),
        ("return one.to('meta')", 'NotImplementedError: Cannot copy out of meta tensor; no data!'),
    ],
)
def test_a_tensor_without_values(tmp_path, line, told):
    file = tmp_path / 'planted_model.py'
    file.write_text(PLANTED.format(line=line, device='cpu'))
    path = config(tmp_path, WITH_PLANTED, ['planted_model'])
    status, out, _ = checked(path, folder=tmp_path)
    assert status == 1
    assert told in out
    if 'Cannot copy' not in told:
        assert f'  in: add (Sum)\n  at: {file}:{NUMBER}: {line}\n' in out


@pytest.mark.parametrize(
    ('arguments', 'told'),
    [
        (['no_such.py'], "'no_such.py' is no file"),
        ([CONFIG, '--model-parallel', 'True'], 'model_parallel.enable=True needs two or more'),
        ([CONFIG, '--model-parallel', 'perhaps'], "invalid choice: 'perhaps'"),
        ([CONFIG, '--devices', '2'], 'Add --model-parallel true'),
        pytest.param(
            [CONFIG, '--cfg-options', 'model.channels=0'], 'the step fails with', marks=needs_modes
        ),
    ],
)
def test_what_cannot_be_checked(arguments, told):
    status, out, err = checked(*arguments)
    assert status != 0
    assert told in out + err


@in_ranks()
def test_runners_of_the_same_second_have_their_own_visualizers(tmp_path):
    found = []
    for _ in range(2):
        with _built(digits_config('cpu', tmp_path)) as (runner, _):
            runner.visualizer.add_scalar('there', 1)
            found.append(runner.visualizer.instance_name)
    assert len(set(found)) == 2
