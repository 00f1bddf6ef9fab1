"""``mmdevplug plan``."""

import json
import os

import mmseg
import pytest
from mmengine.config import Config
from transformers import LlamaConfig, T5Config

from mmdevplug.cli.common import run
from mmdevplug.cli.plan import main
from mmdevplug.model_parallel import DevicePlan
from tests.cli.running import DIGITS
from tests.model_parallel.models import LLAMA, T5, make

SWIN = 'swin/swin-tiny-patch4-window7-in1k-pre_upernet_8xb2-160k_ade20k-512x512.py'


@pytest.fixture
def llama(tmp_path):
    LlamaConfig(**LLAMA, architectures=['LlamaForCausalLM']).save_pretrained(tmp_path)
    return str(tmp_path)


def planned(tmp_path, *arguments):
    path = tmp_path / 'plan.json'
    assert run(main, [*arguments, '--json', str(path)]) == 0
    return DevicePlan.from_dict(json.loads(path.read_text()))


def test_a_transformers_model(llama, tmp_path, capsys):
    made = planned(tmp_path, llama, '--devices', 'cuda:0-2')
    made.check(make('llama'))
    assert made.devices == ['cuda:0', 'cuda:1', 'cuda:2']
    told = capsys.readouterr().out
    assert 'LlamaForCausalLM, balanced' in told
    assert f'imbalance {made.imbalance:.3f}' in told
    assert planned(tmp_path, f'{llama}/config.json', '--devices', 'cuda:0-2') == made


def test_names_are_whole_in_a_narrow_terminal(llama, monkeypatch, capsys):
    monkeypatch.setenv('COLUMNS', '80')
    assert run(main, [llama, '--devices', 'cuda:0-2']) == 0
    told = capsys.readouterr().out
    assert all(len(line) <= 80 for line in told.splitlines())
    # Each begins and ends with a name of the model, which is on one line.
    names = {name for name, _ in make('llama').named_modules()}
    rows = [line.split() for line in told.splitlines() if line.startswith(' cuda:')]
    assert len(rows) == 3
    assert all({row[-2], row[-1]} <= names for row in rows)
    assert run(main, [llama, '--devices', 'cuda:0-2', '--json', '-']) == 0
    printed = json.loads(capsys.readouterr().out)
    assert DevicePlan.from_dict(printed).devices == ['cuda:0', 'cuda:1', 'cuda:2']


def test_the_head_that_a_model_names(tmp_path):
    T5Config(**T5, architectures=['T5EncoderModel']).save_pretrained(tmp_path)
    assert planned(tmp_path, str(tmp_path), '--devices', 'xla:0-1').model == 'T5EncoderModel'


def test_all_options(llama, tmp_path):
    made = planned(
        tmp_path, llama, '--devices', 'cuda:0-1', '--max-memory', 'cuda:0=20kb,cuda:1=400KB',
        '--strategy', 'balanced', '--dtype', 'bfloat16', '--no-split', 'LlamaMLP,lm_head',
        '--no-force-balance', '--allow-cpu',
        '--balance-threshold', '0.2',
    )  # fmt: skip
    assert made.capacities == {'cuda:0': 2500, 'cuda:1': 400_000}
    assert made.loads['cuda:0'] == 0
    assert made.devices[-1] == 'cpu'


def test_a_config_and_its_optimizer(tmp_path):
    made = planned(tmp_path, DIGITS, '--devices', 'gcu:0-1', '--training')
    assert Config.fromfile(DIGITS).optim_wrapper.optimizer.type == 'SGD'
    assert made.parts['optimizer'] == made.parts['gradients']  # momentum
    other = planned(tmp_path, DIGITS, '--devices', 'gcu:0-1', '--training', '--optimizer', 'adamw')
    assert other.parts['optimizer'] == 2 * other.parts['gradients']
    assert planned(tmp_path, DIGITS, '--devices', 'gcu:0-1').parts['optimizer'] == 0


@pytest.mark.operators
def test_a_config_of_mmsegmentation(tmp_path):
    path = os.path.join(os.path.dirname(mmseg.__file__), '.mim', 'configs', SWIN)
    made = planned(tmp_path, path, '--devices', 'cuda:0-1', '--strategy', 'dynamic')
    assert made.model == 'EncoderDecoder'
    assert made.imbalance < 0.3
    assert 'SwinBlockSequence: split between the blocks' in made.steps[0]


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        (['--devices', 'cuda:0,cuda:0'], 'more than once'),
        (['--devices', 'cuda:0-1', '--max-memory', '0=1KB,1=1KB'], 'needs'),
        (['--devices', 'cuda:0-6', '--force-balance'], 'force_balance=True refuses a plan'),
        (['--devices', 'cuda:0-9', '--strategy', 'dynamic'], 'cuda:9 would stay empty'),
        (['--devices', 'cuda:0-1', '--max-memory', '7=1KB'], 'none of the devices'),
        (['--devices', 'cuda:0-1', '--strategy', 'best'], "strategy='best'"),
        (['--devices', 'cuda:0-1', '--json', 'no/such/folder/a.json'], 'cannot be written'),
        (['--devices', 'cuda:0-1', '--training', '--optimizer', 'magic'], "optimizer='magic'"),
        (['--devices', 'cuda:0-1', '--dtype', 'magic'], "dtype='magic'"),
        (['--devices', 'cuda:0-1', '--no-split', 'Nope'], "'Nope', which is neither"),
    ],
)
def test_bad_arguments(llama, arguments, words, capsys):
    assert run(main, [llama, *arguments]) == 1
    told = capsys.readouterr().err
    assert words in told
    assert 'PlacementError' in told or 'DevPlugError' in told


@pytest.mark.parametrize(
    ('text', 'words'),
    [
        (None, 'is no file'),
        ('{"model_type": "nonsense"}', 'cannot be built'),
        ('{', 'cannot be built'),
        ('{}', 'has no `model`'),
        ('{"model": {"type": "Nonsense"}}', 'cannot be built: KeyError'),
    ],
)
def test_bad_models(tmp_path, text, words, capsys):
    path = tmp_path / 'config.json'
    if text is not None:
        path.write_text(text)
    assert run(main, [str(path), '--devices', 'cuda:0-1']) == 1
    assert words in capsys.readouterr().err
