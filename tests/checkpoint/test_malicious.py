"""A checkpoint that would run code when it is loaded is refused, whoever loads it."""

import os

import pytest
import torch
from mmengine.config import Config
from mmengine.config.lazy import LazyObject
from mmengine.logging import HistoryBuffer
from mmengine.optim.scheduler.param_scheduler import OneCycleParamScheduler
from mmengine.utils import get_object_from_string

from mmdevplug.checkpoint.reading import read_checkpoint
from mmdevplug.errors import CheckpointError
from tests.checkpoint.training import TESTED, build, train
from tests.jobs import needs_safe_loading
from tests.ranks import check_errors, errors_of_ranks

pytestmark = needs_safe_loading


class Calls:
    """Pickled as a call."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def resume(work_dir, path):
    train(work_dir, resume=True, load_from=path)


def resume_the_newest(work_dir, path):
    os.makedirs(work_dir)
    os.link(path, work_dir / 'iter_3.pth')
    train(work_dir, resume=True)


def load(work_dir, path):
    train(work_dir, load_from=path)


def initialize(work_dir, path):
    weights = dict(type='Pretrained', checkpoint=path)
    train(work_dir, model=dict(type='NoisyModel', init_cfg=weights))


def run_test(work_dir, path):
    build(work_dir, load_from=path, **TESTED).test()


WAYS = [resume, resume_the_newest, load, initialize, run_test]


# PyTorch's own switch for what is unsafe makes no difference.
@pytest.mark.parametrize(
    ('way', 'switch'),
    [*((way, None) for way in WAYS), (load, '1'), (initialize, '1')],
    ids=lambda value: getattr(value, '__name__', str(value)),
)
def test_refused(tmp_path, way, switch):
    folder = tmp_path / 'made by the checkpoint'
    path = tmp_path / 'malicious.pth'
    payload = Calls(os.mkdir, str(folder))
    torch.save(dict(state_dict={}, meta=dict(epoch=1, iter=3), payload=payload), path)
    environ = dict(TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=switch)
    errors = errors_of_ranks(way, 0, tmp_path / 'work', str(path), environ=environ)
    check_errors(errors, 'CheckpointError', 'mkdir', '.pth')
    assert not folder.exists()


class _Named(Calls):
    """Pickled as a name, of a module's member or a member's member."""

    def __init__(self, owner, name):
        super().__init__(getattr, owner, name)

    def __call__(self):
        """Pickle asks that what is called looks as if it could be."""


#: Ways to make more of what a checkpoint may name.
PAYLOADS = dict(
    calls_scheduler=Calls(OneCycleParamScheduler, None, 'lr', 1.0, 5),
    other_method=_Named(OneCycleParamScheduler, '__init__'),
    globals_of_method=_Named(_Named(OneCycleParamScheduler, '_annealing_cos'), '__globals__'),
    of_buffer=_Named(HistoryBuffer, '__reduce__'),
    registers=Calls(_Named(HistoryBuffer, 'register_statistics'), print),
    of_module=_Named(Calls(__import__, 'os'), 'mkdir'),
    of_list=_Named(list, 'append'),
    imports=Calls(get_object_from_string, 'os.mkdir'),
    lazy=Calls(LazyObject, 'os'),
    config=Calls(Config, dict(a=1)),
    evaluates=Calls(eval, '1'),
    opens=Calls(open, os.devnull),
)


@pytest.mark.parametrize('name', PAYLOADS)
def test_what_mmengines_own_names_cannot_be_used_for(tmp_path, name):
    path = str(tmp_path / 'a.pth')
    torch.save(dict(state_dict={}, payload=PAYLOADS[name]), path)
    with pytest.raises(CheckpointError):
        read_checkpoint(path)
