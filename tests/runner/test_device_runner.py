"""DeviceRunner beside MMEngine's: checkpoints, resume, autopatch."""

import os
import re
from functools import partial

import pytest
from mmengine.config import Config
from mmengine.registry import RUNNERS
from mmengine.runner import FlexibleRunner, Runner

from mmdevplug import DeviceRunner, follow_runner_type
from mmdevplug.cli.common import load_config
from mmdevplug.cli.train import build_parser
from mmdevplug.errors import DevPlugError
from tests.commands import python
from tests.data.jobs import build
from tests.jobs import PATHS, PLAIN, ROOT, digits_config, largest_difference, log_of, train_digits
from tests.ranks import free_port, in_ranks, launch_variables, run_ranks

THREE_EPOCHS = dict(
    PLAIN, train_cfg__max_epochs=3, default_hooks__checkpoint=dict(interval=1, max_keep_ckpts=3)
)
IN_MMSEG = """
import sys
import mmdevplug
import mmseg.models
import torch
from mmengine.config import Config
from mmengine.model import BaseModel
from mmengine.registry import MODELS

@MODELS.register_module()
class Own(BaseModel):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, inputs=None, data_samples=None, mode='tensor'):
        return {}

from mmdevplug.runner import DeviceRunner

cfg = Config.fromfile(mmdevplug.base_config('cpu'))
cfg.merge_from_dict(dict(
    default_scope='mmseg', model=dict(type='Own'), launcher='pytorch', work_dir=sys.argv[1]))
print('wrapper:', type(DeviceRunner.from_cfg(cfg).model).__name__)
"""


@in_ranks()
def test_a_key_that_mmengine_does_not_read_is_warned_of(tmp_path):
    build(tmp_path, fp16=dict(loss_scale=512.0))
    assert "WARNING - fp16={'loss_scale': 512.0} has no effect" in log_of(tmp_path)


@pytest.mark.operators
def test_a_script_of_mmseg_that_imports_only_the_runner(tmp_path):
    """Registries of repositories look into MMEngine's, but have it import nothing."""
    env = {**os.environ, **launch_variables(0, 1, free_port()), 'PYTHONPATH': PATHS}
    done = python('-c', IN_MMSEG, tmp_path, env=env, mmengine=False)
    assert 'wrapper: DeviceDistributedDataParallel' in done.stdout, done.stderr


def train(accelerator, work_dir, **options):
    return train_digits(accelerator, work_dir, **THREE_EPOCHS, **options)['weights']


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """The folder of three epochs on two cards, with a checkpoint of each, and the weights."""
    folder = tmp_path_factory.mktemp('trained')
    return folder, run_ranks(train, 2, 'zeta', folder)[0]


def test_resume_goes_on_as_if_never_stopped(trained, tmp_path):
    folder, whole = trained
    # Saved by a card, resumed on the CPU.
    resume = partial(train, resume=True, load_from=str(folder / 'epoch_2.pth'))
    resumed = run_ranks(resume, 2, 'cpu', tmp_path)
    assert not (tmp_path / 'epoch_2.pth').exists()
    assert largest_difference(whole, resumed[0]) <= 1e-5
    assert largest_difference(resumed[0], resumed[1]) == 0.0


def test_stock_mmengine_loads_our_checkpoint(trained, tmp_path, monkeypatch):
    cfg = digits_config('cpu', tmp_path, **PLAIN)
    cfg.runner_type = 'Runner'
    cfg.load_from = str(trained[0] / 'epoch_3.pth')
    # What stock MMEngine needs on torch 2.6 and later to read any of its own checkpoints.
    monkeypatch.setenv('TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD', '1')
    runner = Runner.from_cfg(cfg)
    assert runner.test()['accuracy'] > 50.0


def build_digits(work_dir):
    cfg = digits_config('cpu', work_dir, **PLAIN)
    RUNNERS.build(cfg)


def test_the_dumped_config_builds_our_runner_by_itself(tmp_path):
    run_ranks(build_digits, 0, tmp_path)
    (dumped,) = tmp_path.glob('*.py')
    script = (
        'from mmengine.config import Config; from mmengine.registry import RUNNERS\n'
        f'cfg = Config.fromfile({str(dumped)!r}); cfg.log_level = "ERROR"\n'
        'print(type(RUNNERS.build(cfg)).__module__)'
    )
    environ = dict(os.environ, PYTHONPATH=PATHS)
    printed = python('-c', script, env=environ, mmengine=False)
    assert printed.returncode == 0, printed.stderr
    assert printed.stdout.splitlines()[-1] == 'mmdevplug.runner.device_runner'


@in_ranks()
def test_autopatch_replaces_runner_and_no_subclass(tmp_path):
    import mmdevplug.autopatch  # noqa: F401

    cfg = digits_config('cpu', tmp_path, **PLAIN)
    cfg.pop('runner_type')

    class OwnRunner(Runner):
        pass

    built = [type(cls.from_cfg(cfg)).__name__ for cls in (Runner, OwnRunner)]
    assert built == ['DeviceRunner', 'OwnRunner']


@in_ranks()
def test_flexible_runner_is_refused_in_one_sentence(tmp_path):
    """Ask for MMEngine's FlexibleRunner in three places."""
    follow_runner_type()
    ours, stock = digits_config('cpu', tmp_path, **PLAIN), digits_config('cpu', tmp_path, **PLAIN)
    ours.strategy = dict(type='DDPStrategy')
    stock.runner_type = 'FlexibleRunner'
    args = build_parser().parse_args(
        [str(ROOT / 'configs/digits/digits_cpu.py'), '--cfg-options', 'runner_type=FlexibleRunner']
    )
    for key, start in (
        ("strategy={'type': 'DDPStrategy'}", lambda: DeviceRunner.from_cfg(ours)),
        ("runner_type='FlexibleRunner'", lambda: RUNNERS.build(stock)),
        ("runner_type='FlexibleRunner'", lambda: load_config(args)),
    ):
        asks = re.escape(f"{key} asks for MMEngine's FlexibleRunner")
        with pytest.raises(DevPlugError, match=f"{asks}.*expected runner_type='DeviceRunner'"):
            start()
    plain = dict(model=dict(type='ToyModel'), work_dir=str(tmp_path))
    with pytest.raises((KeyError, TypeError)):  # not ours: it is built, without such a model
        FlexibleRunner.from_cfg(Config(plain))


def test_one_log_line_says_which_accelerator_and_why(tmp_path):
    run_ranks(build_digits, 2, tmp_path)
    lines = [line for line in log_of(tmp_path).splitlines() if "accelerator 'cpu'" in line]
    assert len(lines) == 1
    assert "accelerator.type='cpu'" in lines[0]
    assert "backend 'gloo'" in lines[0]


@in_ranks(2)
def test_a_wrapped_model_and_a_wrapper_config(tmp_path):
    cfg = digits_config('cpu', tmp_path, **PLAIN)
    cfg.model_wrapper_cfg = dict(type='MMDistributedDataParallel')
    runner = RUNNERS.build(cfg)
    with pytest.raises(TypeError, match='model has been wrapped'):
        runner.wrap_model(cfg.model_wrapper_cfg, runner.model)


def test_configs_are_left_as_they_are(tmp_path):
    cfg = digits_config('cpu', tmp_path, **PLAIN)
    before = cfg.pretty_text
    RUNNERS.build(cfg)
    assert cfg.pretty_text == before
    assert isinstance(cfg, Config)
