"""The T20 code path of ``gcu``, verified on a stand-in: the vendor's interface on torch_xla."""

import os

import pytest

from tests.jobs import PLAIN, ROOT, digits_config, largest_difference, train_digits, train_plain
from tests.ranks import in_ranks, run_ranks
from tests.xla.t20 import T20, with_calls

pytestmark = pytest.mark.xla


@in_ranks(**dict(T20, environ=dict(TOPS_VISIBLE_DEVICES='0,1,2')))
def test_cards_are_xla_devices():
    import t20_card
    import torch

    from mmdevplug.accelerators import T20Accelerator, get_accelerator
    from mmdevplug.errors import AcceleratorError

    accelerator = get_accelerator('gcu')
    assert type(accelerator) is T20Accelerator
    assert accelerator.device(1) == torch.device('xla', 1)
    with pytest.raises(AcceleratorError, match=r"TOPS_VISIBLE_DEVICES='0,1,2'") as raised:
        accelerator.device(3)
    assert '3 gcu device(s)' in str(raised.value)
    assert accelerator.device_count() == 3
    assert t20_card.calls['gcu_device'] >= 1


def train_as_shipped(work_dir):
    from mmengine.config import Config

    cfg = Config.fromfile(str(ROOT / 'configs' / 'digits' / 'digits_gcu_t20_8x.py'))
    assert cfg.train_dataloader.batch_size == 16
    return train_digits('gcu', work_dir)


def test_ranks_are_each_on_their_card(tmp_path):
    # `make test-t20` trains this on eight cards.
    results = run_ranks(with_calls, 2, train_as_shipped, tmp_path, timeout=280, **T20)
    assert results[0][0]['accuracy'] >= 97.0
    for rank, (result, calls) in enumerate(results):
        assert result['device'] == f'xla:{rank}'
        assert result['staged']
        # The GCU's own functions ran: two flushes an iteration, and fetches for checkpoints.
        assert calls['sync_lived_tensor'] >= 2 * 176
        assert 1 <= calls['unlazy'] < 176
    one, other = (
        {
            name: value
            for name, value in result['weights'].items()
            if 'running' not in name and 'num_batches' not in name
        }
        for result, _ in results
    )
    assert largest_difference(one, other) == 0.0


def test_weights_equal_those_of_one_process_on_the_cpu(tmp_path):
    (expected,) = run_ranks(train_plain, 0, 'cpu', tmp_path / 'cpu')
    for result in run_ranks(train_plain, 2, 'gcu', tmp_path / 'gcu', **T20):
        assert largest_difference(result['weights'], expected['weights']) <= 1e-4


@in_ranks(2, **T20)
def test_stock_runner_leaves_the_model_on_the_cpu(tmp_path):
    from mmengine.registry import RUNNERS
    from torch import distributed as torch_dist

    torch_dist.init_process_group('gloo')
    cfg = digits_config('cpu', tmp_path, **PLAIN)
    cfg.pop('accelerator')  # which no runner of MMEngine's passes over
    cfg.runner_type = 'Runner'
    cfg.env_cfg = dict(dist_cfg=dict(backend='gloo'))
    with pytest.raises(ValueError, match=r"device\(type='cpu'\)") as raised:
        RUNNERS.build(cfg)
    assert f'device_ids [{os.environ["LOCAL_RANK"]}]' in str(raised.value)


@in_ranks(**T20)
def test_the_vendors_interface_is_whole_on_torch_xla():
    from tests.t20.test_interface import read_names, resolve

    missing = []
    for module, line in read_names():
        name = line.split('(')[0].split(' = ')[0]
        try:
            resolve(module, name)
        except (AttributeError, ImportError):
            missing.append(f'{module}.{name}')
    assert missing == []
