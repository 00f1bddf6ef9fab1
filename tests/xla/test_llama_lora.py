"""The Llama example spread over lazy devices trains as it does on one."""

import re

import pytest

from tests.cli.checking import checked
from tests.examples.training import TEN_STEPS, train_llama
from tests.jobs import ROOT, largest_difference
from tests.ranks import run_ranks

pytestmark = pytest.mark.xla

THREE_DEVICES = dict(PJRT_DEVICE='CPU', CPU_NUM_DEVICES='3')
#: As small as can be spread: most of the time goes into compiling.
OPTIONS = dict(
    TEN_STEPS,
    **{'model.config.num_hidden_layers': 3, 'model.lora.target_modules': ['q_proj', 'down_proj']},
)


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """Ten steps on one device and on three."""

    folder = tmp_path_factory.mktemp('llama')
    return [
        run_ranks(train_llama, 0, 'xla', folder, name, OPTIONS, environ=THREE_DEVICES)[0]
        for name in ('llama_lora.py', 'llama_lora_3_devices.py')
    ]


def test_losses_and_weights_are_those_of_one_device(trained):
    one, three = trained
    assert len(one['losses']) == len(three['losses']) == 10
    assert three['losses'] == pytest.approx(one['losses'], abs=1e-5)
    assert three['bits_per_byte'] == pytest.approx(one['bits_per_byte'], abs=1e-5)
    assert largest_difference(one['before'], three['before']) == 0.0
    assert largest_difference(one['after'], three['after']) <= 1e-5
    # It has learnt something, so that equal weights say something.
    assert largest_difference(three['before'], three['after']) >= 1e-2


def test_three_devices_are_used_in_the_order_of_layers(trained):
    one, three = trained
    assert set(one['devices'].values()) == {'xla:0'}
    assert set(three['devices'].values()) == {'xla:0', 'xla:1', 'xla:2'}
    by_layer = {
        int(found.group(1)): device
        for name, device in three['devices'].items()
        for found in [re.search(r'\.layers\.(\d+)\.', name)]
        if found
    }
    assert list(by_layer.values()) == sorted(by_layer.values())
    assert len(by_layer) == 3


def test_adapters_are_where_their_layer_is(trained):
    devices = trained[1]['devices']
    pairs = [
        (device, devices[re.sub(r'lora_[AB]\.default', 'base_layer', name)])
        for name, device in devices.items()
        if 'lora_' in name
    ]
    assert len(pairs) == 3 * 2 * 2
    assert all(adapter == base for adapter, base in pairs)


def test_options_as_others_name_them(tmp_path):
    options = dict(OPTIONS, **{'train_cfg.max_iters': 5, 'train_cfg.val_interval': 5})
    (found,) = run_ranks(
        train_llama, 0, 'xla', tmp_path, 'llama_lora_dynamic.py', options, environ=THREE_DEVICES
    )
    assert set(found['devices'].values()) == {'xla:0', 'xla:1', 'xla:2'}
    assert found['losses'][-1] < found['losses'][0] - 0.3
    in_bf16 = {name for name, dtype in found['dtypes'].items() if dtype == 'torch.bfloat16'}
    assert in_bf16 >= {name for name in found['dtypes'] if 'base_layer' in name}
    assert not {name for name in in_bf16 if 'lora_' in name or 'modules_to_save' in name}


def test_the_check_sees_all_three():
    config = ROOT / 'configs' / 'llama_lora' / 'llama_lora_3_devices.py'
    arguments = ['--accelerator', 'xla', '--cfg-options', 'model.config.num_hidden_layers=3']
    status, out, err = checked(config, *arguments, **THREE_DEVICES)
    assert status == 0, out + err
    assert out.splitlines()[-1] == 'consistent: one training step on xla:0, xla:1, xla:2'
    assert '* model_parallel.enable=true  model_parallel on xla:0, xla:1, xla:2' in out
