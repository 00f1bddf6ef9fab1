"""The Llama example learns, and only where it is meant to."""

import math

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS

from mmdevplug.config.model_parallel import ModelParallelOptions
from mmdevplug.examples.llama import BitsPerByte, PythonHelpText
from mmdevplug.model_parallel import plan
from mmdevplug.model_parallel.lora_check import check_r_consistency
from tests.examples.training import FOLDER, llama_config, train_llama
from tests.jobs import need_peft
from tests.ranks import run_ranks

SIXTY_STEPS = {
    'model.config.num_hidden_layers': 2,
    'train_cfg.max_iters': 60,
    'train_cfg.val_interval': 60,
}


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    need_peft()
    folder = tmp_path_factory.mktemp('llama')
    (found,) = run_ranks(train_llama, 0, 'cpu', folder, 'llama_lora.py', SIXTY_STEPS)
    return found


def test_the_loss_falls(trained):
    first, last = trained['losses'][0], np.mean(trained['losses'][-5:])
    assert len(trained['losses']) == 60
    assert first == pytest.approx(math.log(256), rel=0.05)
    assert last < 0.7 * first
    assert trained['bits_per_byte'] < 0.7 * 8


def test_adapters_embedding_and_head_are_trained_and_nothing_else(trained):
    changed = {
        name
        for name, value in trained['before'].items()
        if not np.array_equal(value, trained['after'][name])
    }
    assert changed == {
        name for name in trained['before'] if 'lora_' in name or 'modules_to_save' in name
    }


def test_adapters_begin_at_zero(trained):
    # In the runner, after MMEngine has initialized weights.
    begun = [value for name, value in trained['before'].items() if 'lora_B' in name]
    assert len(begun) == 2 * 7
    assert not any(value.any() for value in begun)


@pytest.mark.parametrize(
    ('lora', 'frozen'), [(None, 0), (dict(r=2, target_modules=['q_proj']), 9)]
)
def test_model_with_and_without_adapters(lora, frozen):
    if lora:
        need_peft()
    small = dict(hidden_size=16, intermediate_size=8, num_hidden_layers=1, vocab_size=32)
    heads = dict(num_attention_heads=2, num_key_value_heads=2)
    config = dict(type='LlamaForText', config=dict(small, **heads), lora=lora)
    model = MODELS.build(config)
    weights = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert len(weights) == (12 if frozen else 0)
    assert sorted(check_r_consistency(model)) == ([2] if lora else [])
    assert model(torch.zeros(3, 5, dtype=torch.int64)).shape == (3, 5, 32)


def test_a_model_that_knows_nothing_needs_eight_bits(tmp_path):
    cfg = llama_config('cpu', tmp_path)
    model = MODELS.build(dict(cfg.model, lora=None)).eval()
    torch.nn.init.zeros_(model.llama.lm_head.weight)
    metric = BitsPerByte()
    for batch in (3, 1):
        tokens = torch.randint(0, 256, (batch, 9))
        with torch.no_grad():
            metric.process(None, model(tokens, mode='predict'))
            loss = model(tokens, mode='loss')['loss']
        assert loss.item() == pytest.approx(math.log(256))
    assert metric.evaluate(4)['bits_per_byte'] == pytest.approx(8.0)


def test_text():
    train, test = PythonHelpText(length=32), PythonHelpText('test', length=32)
    pieces = [bytes(test[i]['inputs'].tolist()) for i in (0, 1, len(test) - 1)]
    assert all(len(piece) == 32 for piece in pieces)
    assert len(test) == math.ceil((len(train) + len(test)) / 10) >= 1000
    first = b''.join(bytes(split[i]['inputs'].tolist()) for split, i in [(test, 0), (train, 0)])
    from pydoc_data.topics import topics

    assert topics[min(topics)].encode().startswith(first)
    with pytest.raises(ValueError, match="'train' or 'test'"):
        PythonHelpText('val')


@pytest.mark.parametrize('path', sorted(FOLDER.glob('*.py')), ids=lambda path: path.name)
def test_configs_build_one_model(path):
    cfg = Config.fromfile(str(path))
    base = Config.fromfile(str(FOLDER / 'llama_lora.py'))
    assert cfg.model == base.model
    options = ModelParallelOptions.from_config(cfg.get('model_parallel'))
    assert (options.enable, options.strategy, options.precision, options.check_r_consistency) == {
        'llama_lora.py': (False, 'balanced', None, False),
        'llama_lora_3_devices.py': (True, 'balanced', 'fp32', False),
        'llama_lora_dynamic.py': (True, 'dynamic', 'bf16', True),
    }[path.name]


def test_a_plan_counts_gradients_and_optimizer_state_of_what_is_trained(tmp_path):
    need_peft()
    model = MODELS.build(llama_config('cpu', tmp_path).model)
    made = plan(model, ['xla:0', 'xla:1', 'xla:2'], training=True, optimizer='adamw')
    trained = sum(p.numel() * 4 for p in model.parameters() if p.requires_grad)
    every = sum(p.numel() * 4 for p in model.parameters())
    assert made.parts['parameters'] == every > 2 * trained
    assert made.parts['gradients'] == trained
    assert made.parts['optimizer'] == 2 * trained
    assert sum(made.loads.values()) == sum(made.parts.values())
    for name, module in model.named_modules():
        if hasattr(module, 'base_layer'):
            # As one, with its adapters.
            assert made.device_of(name) == made.device_of(f'{name}.base_layer.weight')
            assert made.device_of(name) == made.device_of(f'{name}.lora_A.default.weight')
