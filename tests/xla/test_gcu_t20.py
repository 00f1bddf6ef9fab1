"""The T20 code path of ``gcu``, verified on a stand-in: the vendor's interface on torch_xla."""

import os

import pytest

from tests.jobs import PLAIN, ROOT, digits_config, largest_difference, train_digits, train_plain
from tests.ranks import run_ranks
from tests.xla.t20 import on_t20, with_calls

pytestmark = pytest.mark.xla


def look():
    import torch

    from mmdevplug.accelerators import T20Accelerator, get_accelerator
    from mmdevplug.errors import AcceleratorError

    accelerator = get_accelerator('gcu')
    assert type(accelerator) is T20Accelerator
    assert accelerator.device(1) == torch.device('xla', 1)
    with pytest.raises(AcceleratorError, match=r"TOPS_VISIBLE_DEVICES='0,1,2'") as raised:
        accelerator.device(3)
    return accelerator.device_count(), str(raised.value)


def test_cards_are_xla_devices():
    (((count, message), calls),) = run_ranks(
        with_calls, 0, look, environ=dict(TOPS_VISIBLE_DEVICES='0,1,2')
    )
    assert count == 3
    assert '3 gcu device(s)' in message
    assert calls['gcu_device'] >= 1


def train_as_shipped(work_dir):
    from mmengine.config import Config

    cfg = Config.fromfile(str(ROOT / 'configs' / 'digits' / 'digits_gcu_t20_8x.py'))
    assert cfg.train_dataloader.batch_size == 16
    return train_digits('gcu', work_dir)


def test_ranks_are_each_on_their_card(tmp_path):
    # `make test-t20` trains this on eight cards.
    results = run_ranks(with_calls, 2, train_as_shipped, tmp_path, timeout=280)
    assert results[0][0]['accuracy'] >= 97.0
    for rank, (result, calls) in enumerate(results):
        assert result['device'] == f'xla:{rank}'
        assert result['staged']
        # The GCU's own functions ran: two flushes an iteration, and fetches for checkpoints.
        assert calls['sync_lived_tensor'] >= 2 * 176
        assert 1 <= calls['unlazy'] < 176
    first = results[0][0]['weights']
    for result, _ in results[1:]:
        plain = [name for name in first if 'running' not in name and 'num_batches' not in name]
        assert (
            largest_difference(
                {name: result['weights'][name] for name in plain},
                {name: first[name] for name in plain},
            )
            == 0.0
        )


def test_weights_equal_those_of_one_process_on_the_cpu(tmp_path):
    (expected,) = run_ranks(train_plain, 0, 'cpu', tmp_path / 'cpu')
    for result, _ in run_ranks(with_calls, 2, train_plain, 'gcu', tmp_path / 'gcu'):
        assert largest_difference(result['weights'], expected['weights']) <= 1e-4


def stock_runner(work_dir):
    from mmengine.registry import RUNNERS
    from torch import distributed as torch_dist

    torch_dist.init_process_group('gloo')
    cfg = digits_config('cpu', work_dir, **PLAIN)
    cfg.pop('accelerator')  # which no runner of MMEngine's passes over
    cfg.runner_type = 'Runner'
    cfg.env_cfg = dict(dist_cfg=dict(backend='gloo'))
    runner_error = None
    try:
        RUNNERS.build(cfg)
    except ValueError as error:
        runner_error = str(error)
    return os.environ['LOCAL_RANK'], runner_error


def test_stock_runner_leaves_the_model_on_the_cpu(tmp_path):
    for (local_rank, message), _ in run_ranks(with_calls, 2, stock_runner, tmp_path):
        assert f'device_ids [{local_rank}]' in message
        assert "device(type='cpu')" in message


def missing_names():
    from tests.t20.test_interface import read_names, resolve

    missing = []
    for module, line in read_names():
        name = line.split('(')[0].split(' = ')[0]
        try:
            resolve(module, name)
        except (AttributeError, ImportError):
            missing.append(f'{module}.{name}')
    return missing


def test_the_vendors_interface_is_whole_on_torch_xla():
    assert run_ranks(on_t20, 0, missing_names) == [[]]
