"""The suite passes on the CPU and on stand-ins, and says what is wrong with a broken card."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mmdevplug.accelerators.probe import difference
from mmdevplug.checks.accelerators import missing_kernel
from mmdevplug.checks.conformance import operations
from mmdevplug.checks.conformance.card import Card, Failed, NotSupported, require
from mmdevplug.checks.conformance.checks import CHECKS, MOST_TEXT, run_checks, work
from mmdevplug.cli.conformance import main
from tests.checks.running import environment
from tests.columns import LAZY
from tests.native import native_environment, needs_native
from tests.needs_card import needs_card

from .running import in_groups, measured

FOLDER = Path(__file__).parent


@pytest.mark.long
@pytest.mark.timeout(600)
@in_groups
def test_cpu(tmp_path, checks):
    measured(tmp_path, 'cpu', checks, environment(), {'device guard'})


@pytest.mark.long
@pytest.mark.timeout(600)
@needs_native
@in_groups
def test_card_with_a_backend(tmp_path, checks):
    found = measured(tmp_path, 'npu', checks, native_environment('npu', OMP_NUM_THREADS='1'))
    for check in {'collectives', 'training on 2 ranks', 'synchronized batch norm'} & found.keys():
        assert "2 ranks on npu:0, npu:1, backend 'hccl'" in found[check]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize('accelerator', [LAZY])
@in_groups
def test_the_lazy_device_of_pytorch(tmp_path, checks, accelerator):
    """What fails is listed in the documentation as its own."""
    own = {'operations'} & set(checks)
    found = measured(tmp_path, accelerator, checks, environment(), {'mixed precision'}, failed=own)
    # The row is cut after the first of them: `chunk` fails as `split` does.
    for name in ('4 wrong: std', 'split', 'masked_select') if own else ():
        assert f'{name} ' in found['operations']


@pytest.mark.xla
@pytest.mark.timeout(600)
@in_groups
def test_xla(tmp_path, checks):
    measured(tmp_path, 'xla', checks, environment(CPU_NUM_DEVICES='2'))


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """Run one check on a card with a fault, and return its finding."""
    path = tmp_path / 'broken.py'
    path.write_text("custom_imports = dict(imports=['broken_card'])\naccelerator = 'zeta'\n")

    def run(fault, check, timeout=60.0):
        for name, value in environment(FOLDER, BROKEN=fault).items():
            monkeypatch.setenv(name, value)
        detected, found = run_checks('zeta', str(path), timeout, [check])
        assert detected.level == 'passed', detected
        return found

    return run


@needs_card
@pytest.mark.parametrize(
    ('fault', 'check', 'words'),
    [
        ('operation', 'operations', '1 wrong: nn.functional.silu differs by 0.01'),
        ('abort', 'operations', 'silu on zeta:0 ended the process with SIGABRT'),
        ('strides', 'copies', 'torch.float32, transposed, sent and fetched: differs by'),
        ('generator', 'random numbers', 'a restored state of the generator of zeta:0 draws'),
    ],
)
def test_a_fault_is_named(broken, fault, check, words):
    found = broken(fault, check)
    assert found.level == 'failed'
    assert words in found.found
    assert '\n' not in found.found
    assert found.remedy == CHECKS[check].remedy


@needs_card
def test_a_missing_kernel_is_named_and_not_judged(broken):
    found = broken('missing', 'operations')
    assert found.level == 'not supported'
    assert 'no kernel for 1: nn.functional.silu (aten::silu)' in found.found
    assert len(found.found) <= MOST_TEXT


def test_an_operation_that_cannot_be_tried_costs_no_other(monkeypatch):
    def refuse(*args, **kwargs):
        raise AttributeError("type object 'Card' has no attribute 'get_rng_state'")

    def info(op):
        sample = SimpleNamespace(input=torch.ones(2), args=(), kwargs={})
        return SimpleNamespace(
            name='sin',
            op=op,
            supports_autograd=False,
            sample_inputs=lambda *args, **kwargs: [sample],
        )

    known = dict(sin=info(refuse), exp=info(torch.exp))
    monkeypatch.setattr(operations, '_samples_of_pytorch', lambda: known)
    card = Card(dict(accelerator='cpu', config=None), lambda step: None)
    with pytest.raises(Failed) as told:
        operations.check_operations(card)
    assert "1 wrong: sin cannot be tried: type object 'Card' has no" in str(told.value)
    assert '1 samples of 2 operations' in str(told.value)


@needs_card
def test_rows_follow_a_detection_that_failed(tmp_path, monkeypatch):
    for name, value in environment(FOLDER, BROKEN='product').items():
        monkeypatch.setenv(name, value)
    path = tmp_path / 'broken.py'
    path.write_text("custom_imports = dict(imports=['broken_card'])\naccelerator = 'zeta'\n")
    detected, found = run_checks('zeta', str(path), 60.0, ['copies'])
    assert detected.level == 'failed'
    assert 'zeta:0 computes wrongly: matmul differs by 0.5' in detected.found
    assert (found.section, found.level) == ('copies', 'passed')


@needs_card
def test_a_detection_names_the_kernels_that_are_missing(tmp_path, monkeypatch):
    variables = dict(FAKECARD_NAME='zeta', FAKECARD_COUNT='2', FAKECARD_VARIANT='no_kernels')
    for name, value in environment(**variables).items():
        monkeypatch.setenv(name, value)
    path = tmp_path / 'card.py'
    path.write_text("custom_imports = dict(imports=['fakecard_from_env'])\naccelerator = 'zeta'\n")
    detected, found = run_checks('zeta', str(path), 60.0, ['mixed precision'])
    assert detected.level == found.level == 'not supported'
    assert 'no kernel for aten::convolution_overrideable (convolution), and 1' in detected.found
    assert found.found == 'no kernel for aten::convolution_overrideable'


@pytest.mark.parametrize(
    ('text', 'operator'),
    [
        (
            "Could not run 'aten::silu.out' with arguments from the 'zeta' backend.",
            'aten::silu.out',
        ),
        ("The operator 'aten::x' is not currently implemented for the MPS device.", 'aten::x'),
        ('kernel timed out', None),
    ],
)
def test_what_says_that_a_kernel_is_missing(text, operator):
    assert missing_kernel(text) == operator


def test_options_of_the_config_can_be_replaced(capfd):
    arguments = ['--accelerator', 'zeta', '--cfg-options', 'accelerator.device_count=no']
    with pytest.raises(SystemExit):
        main([*arguments, 'accelerator.package=torch_nothing'])
    assert "accelerator.device_count='no': expected the number" in capfd.readouterr().out


@needs_card
def test_a_card_that_hangs_is_given_up(broken):
    found = broken('hang', 'operations', timeout=25.0)
    assert found.level == 'failed'
    assert 'nn.functional.silu on zeta:0 gave no answer for 25 s' in found.found


@pytest.mark.long
@needs_card
def test_gradients_that_are_wrong(broken):
    found = broken('gradients', 'collectives')
    assert found.level == 'failed'
    assert 'gradient averaging: a tensor of rank 0 holds' in found.found
    trained = broken('gradients', 'training on 2 ranks')
    assert trained.level == 'failed'
    assert 'differ by' in trained.found


def test_without_a_device_nothing_else_is_tried(monkeypatch):
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')
    (detected,) = run_checks('cuda')
    assert detected.level == 'failed'
    assert "cuda: no device (CUDA_VISIBLE_DEVICES='')" in detected.found
    assert detected.remedy == 'unset CUDA_VISIBLE_DEVICES'


def test_a_name_that_nobody_registered_is_explained_by_the_package():
    (detected,) = run_checks('nosuchcard')
    assert detected.level == 'failed'
    assert "names the accelerator 'nosuchcard', which is unknown" in detected.found
    assert "--config that names the maker's package" in detected.remedy


def test_one_device_is_too_few_for_two_ranks_unless_they_can_share_it(tmp_path):
    options = dict(accelerator='zeta', config=None, timeout=60.0, ranks=1)
    with pytest.raises(NotSupported, match='2 ranks need 2 devices, and 1 is here'):
        Card(options, print).need_ranks(2)
    path = tmp_path / 'shared.py'
    path.write_text("accelerator = dict(type='zeta', backend='gloo')\n")
    Card(dict(options, config=str(path)), print).need_ranks(2)
    Card(dict(options, ranks=None), print).need_ranks(2)


@pytest.mark.long
@needs_card
def test_two_ranks_share_a_device(tmp_path, monkeypatch):
    for name, value in environment(FAKECARD_NAME='zeta', FAKECARD_COUNT='1').items():
        monkeypatch.setenv(name, value)
    path, imports = tmp_path / 'shared.py', "custom_imports = dict(imports=['fakecard_from_env'])"
    path.write_text(f"{imports}\naccelerator = dict(type='zeta', backend='gloo')\n")
    detected, found = run_checks('zeta', str(path), 100.0, ['training on 2 ranks'])
    assert [detected.level, found.level] == ['passed', 'passed'], found
    assert "2 ranks on zeta:0, zeta:0, backend 'staged'" in found.found


def test_without_the_samples_of_pytorch_operations_are_not_judged(monkeypatch):
    monkeypatch.setitem(sys.modules, 'torch.testing._internal.common_methods_invocations', None)
    options = dict(accelerator='cpu', config=None, timeout=60.0, ranks=None)
    (found,) = work('operations', options, lambda step: None)
    assert found.level == 'not supported'
    assert 'pip install expecttest' in found.found


@pytest.mark.parametrize(
    ('found', 'expected', 'apart'),
    [
        ([1.0, 2.2], [1.0, 2.0], 0.1),
        ([0.0, float('nan')], [0.0, float('nan')], 0.0),
        ([float('inf')], [float('inf')], 0.0),
        ([float('inf')], [float('-inf')], float('inf')),
        ([float('nan'), 1.0], [1.0, 1.0], float('inf')),
        ([1.0], [1.0, 1.0], float('inf')),
        ([], [], 0.0),
    ],
)
def test_difference(found, expected, apart):
    assert difference(torch.tensor(found), torch.tensor(expected)) == pytest.approx(apart)


def test_a_difference_that_is_no_number_fails():
    with pytest.raises(Failed, match='losses differ by nan, tolerance 0.01'):
        require(float('nan'), 0.01, 'losses')
    assert require(0.0, 0.01, 'losses') == '0.0e+00 (tolerance 0.01)'


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        (['--timeout', '0'], '--timeout 0: expected a number above 0.'),
        (['--json', '/proc/none/results.json'], '--json'),
    ],
)
def test_arguments_are_refused_before_anything_runs(arguments, words):
    with pytest.raises(Exception, match=words.replace('.', r'\.')):
        main(['--accelerator', 'cpu', *arguments])


def test_a_failed_check_decides_the_exit_status(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '-1')
    path = tmp_path / 'results.json'
    with pytest.raises(SystemExit) as ended:
        main(['--accelerator', 'cuda', '--json', str(path)])
    assert ended.value.code == 1
    assert json.loads(path.read_text())['exit_status'] == 1
    printed = capfd.readouterr()
    assert '| detection | failed | cuda: no device' in printed.out
    assert 'mmdevplug: detection: unset CUDA_VISIBLE_DEVICES' in printed.err
    assert os.environ['CUDA_VISIBLE_DEVICES'] == '-1'
