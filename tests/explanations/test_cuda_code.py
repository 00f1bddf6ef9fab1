"""Code of users that asks for CUDA where there is none: which line, and what to write there."""

import inspect

import pytest
import torch

from tests.jobs import install_card
from tests.ranks import RanksFailed, run_ranks

from . import jobs
from .running import config, mmdevplug

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason='is about hosts without CUDA')


def attempts(work_dir, accelerator, cases):
    """The error of each case, in one process; None where there was none."""
    install_card(accelerator)
    found = {}
    for name, options in cases.items():
        try:
            jobs.train(work_dir / name, accelerator, **options)
        except Exception as error:
            found[name] = (type(error).__name__, str(error), type(error.__cause__).__name__)
        else:
            found[name] = None
    return found


def _makes_cuda_generators():
    """Whether generators for CUDA need no card: PyTorch 1.10, where it was built with CUDA."""
    try:
        torch.Generator(device='cuda')
    except RuntimeError:
        return False
    return True


def line_of(code):
    """Where a line is in the jobs."""
    (line,) = [
        number
        for number, text in enumerate(inspect.getsource(jobs).splitlines(), 1)
        if code in text
    ]
    return f'{jobs.__file__}:{line} '


#: For each place: a part of the line, and of what to write.
PLACES = dict(
    init=('self.scale = torch.ones(1).cuda()', 'Leave it on the host'),
    module=("self.net.to('cuda')", 'Leave it on the host'),
    method=('outputs + torch.ones(1).cuda()', 'x.to(other.device)'),
    to=("outputs.to('cuda:0')", 'x.to(other.device)'),
    factory=("torch.zeros(1, device='cuda')", 'other.new_zeros'),
    type=('torch.cuda.FloatTensor(1)', 'other.new_zeros'),
    astype=('outputs.type(torch.cuda.FloatTensor)', 'x.to(other)'),
    synchronize=('torch.cuda.synchronize()', 'rank_device()'),
    set_device=('torch.cuda.set_device(0)', 'the runner has chosen the device'),
    predict=("one.to(torch.device('cuda'))", 'x.to(other.device)'),
    generator=("torch.Generator(device='cuda')", 'device=other.device'),
)


@pytest.mark.parametrize(
    'accelerator', ['cpu', 'zeta', pytest.param('xla', marks=pytest.mark.xla)]
)
def test_line_and_what_to_write_are_named(tmp_path, accelerator):
    cases = {place: dict(model=dict(where=place)) for place in PLACES}
    cases['hook'] = dict(hooks=[dict(type='HookForCuda')])
    cases['nowhere'] = {}
    expected = dict(PLACES, hook=('torch.cuda.current_stream()', 'rank_device()'))
    (found,) = run_ranks(attempts, 0, tmp_path, accelerator, cases)
    assert found.pop('nowhere') is None
    if _makes_cuda_generators():
        expected.pop('generator')
        assert found.pop('generator') is None
    for place, (code, advice) in expected.items():
        kind, message, cause = found[place]
        assert kind == 'ModelError', (place, kind, message)
        assert line_of(code) in message, (place, message)
        assert code in message
        assert advice in message, (place, message)
        assert f'computes on {accelerator}' in message
        assert cause != 'NoneType'  # PyTorch's own error


def test_worker_process_of_a_data_loader_is_looked_into(tmp_path):
    options = dict(dataset=dict(cuda=True), train_dataloader=dict(num_workers=1))
    (found,) = run_ranks(attempts, 0, tmp_path, 'cpu', dict(worker=options))
    kind, message, _ = found['worker']
    assert kind == 'ModelError', message
    assert line_of('inputs = inputs.cuda()') in message
    without_cuda = 'Torch not compiled with CUDA enabled'
    assert (without_cuda if torch.version.cuda is None else 'in forked subprocess') in message


@pytest.mark.parametrize('where', ['init', 'method'])
def test_all_ranks_stop_with_the_line_of_one(tmp_path, where):
    with pytest.raises(RanksFailed) as failed:
        run_ranks(jobs.train, 2, tmp_path, 'cpu', dict(where=where, rank=1))
    errors = failed.value.errors
    assert errors[1][0] == 'ModelError'
    assert errors[0][0] == 'RankFailedError'
    for rank in (0, 1):
        assert line_of(PLACES[where][0]) in errors[rank][1]
    assert 'rank 1' in errors[0][1]


MODEL = """
import torch
from mmengine.registry import MODELS
from mmdevplug.examples.digits import DigitsClassifier

@MODELS.register_module()
class Mine(DigitsClassifier):
    def forward(self, inputs, labels=None, mode='tensor'):
        return super().forward(inputs.cuda(), labels, mode)
"""


@pytest.mark.long
def test_what_all_ranks_meet_is_told_once(tmp_path):
    (tmp_path / 'mine.py').write_text(MODEL)
    imports = "custom_imports = dict(imports=['mine'], allow_failed_imports=False)\n"
    path = config(tmp_path, f"{imports}model = dict(type='Mine')")
    done = mmdevplug(tmp_path, 'train', path, '--nproc', 2)
    assert done.returncode == 1
    assert 'Traceback' not in done.stderr
    assert done.stderr.count(f'{tmp_path}/mine.py:9 (in Mine.forward)') == 1
    assert done.stderr.count('stops too; see rank') == 1
