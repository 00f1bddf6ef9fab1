"""Real lazy devices: torch_xla on PJRT's CPU client."""

import os
import subprocess
import sys

import pytest
from mmengine.registry import RUNNERS

from tests.columns import job_of
from tests.jobs import PATHS, PLAIN, digits_config
from tests.ranks import in_ranks, run_ranks
from tests.xla.executions import cost_of, train_counted

pytestmark = pytest.mark.xla


@in_ranks(environ=dict(CPU_NUM_DEVICES='4'))
def test_devices_of_one_process():
    import torch

    from mmdevplug.accelerators import get_accelerator
    from mmdevplug.accelerators.probe import probe_device
    from mmdevplug.errors import AcceleratorError

    accelerator = get_accelerator('xla')
    assert accelerator.compilation.lazy
    assert accelerator.device_count() == 4
    assert accelerator.device(3) == torch.device('xla', 3)
    with pytest.raises(AcceleratorError, match='CPU_NUM_DEVICES'):
        accelerator.device(4)
    for index in range(4):
        probe_device(accelerator, accelerator.device(index))
    host = [torch.randn(3, 2), torch.ones(4, dtype=torch.int64), torch.randn(2).bfloat16()]
    sent = [torch.empty_like(value, device='xla:3') for value in host]
    accelerator.copies.into_device(host, sent)
    fetched = accelerator.copies.to_host(sent)
    assert all(torch.equal(one, other) for one, other in zip(host, fetched))
    assert {str(value.device) for value in sent} == {'xla:3'}
    assert accelerator.memory_allocated() is None  # PJRT's CPU client keeps no statistics


DETECT = """
from mmdevplug.accelerators import available_accelerators, choose_accelerator
print(choose_accelerator().accelerator.name, available_accelerators())
"""


@pytest.mark.parametrize(('asked_for', 'chosen'), [('CPU', 'xla'), (None, 'cpu')])
def test_detection_prefers_xla_only_where_pjrt_was_asked_for(asked_for, chosen):
    # Importing torch_xla sets PJRT_DEVICE if it is not set, hence a fresh process.
    environ = {name: value for name, value in os.environ.items() if name != 'PJRT_DEVICE'}
    environ.update({} if asked_for is None else {'PJRT_DEVICE': asked_for})
    environ['PYTHONPATH'] = PATHS
    printed = subprocess.run(
        [sys.executable, '-c', DETECT], env=environ, capture_output=True, text=True, check=True
    )
    assert printed.stdout.splitlines()[-1] == f"{chosen} ['xla', 'cpu']"


@in_ranks(2, **job_of('xla'))
def test_stock_ddp_refuses_tensors_of_a_lazy_device():
    from torch import distributed as torch_dist, nn
    from torch.nn.parallel import DistributedDataParallel

    torch_dist.init_process_group('gloo')
    layer = nn.Linear(2, 2).to(f'xla:{os.environ["LOCAL_RANK"]}')
    with pytest.raises(RuntimeError, match='invalid tensor type.*xla'):
        DistributedDataParallel(layer)


def count_executions(work_dir, accumulative_counts):
    """Executions and compilations of each iteration after the first epoch."""
    cfg = digits_config('xla', work_dir, **PLAIN)
    cfg.model.norm = True
    cfg.train_cfg.max_epochs = 4
    cfg.train_dataloader.batch_size = 64
    cfg.default_hooks.logger.interval = 5
    cfg.optim_wrapper.accumulative_counts = accumulative_counts
    return cost_of(train_counted(RUNNERS.build(cfg))[11:])


@pytest.mark.parametrize(
    ('ranks', 'accumulative_counts', 'expected'), [(0, 1, {1}), (2, 1, {2}), (2, 2, {1, 2})]
)
def test_executions_of_an_iteration_and_no_recompilation(
    tmp_path, ranks, accumulative_counts, expected
):
    # A real run of MMEngine's, with its logging and a scheduler that changes the rate each time.
    job = job_of('xla', ranks)
    for executions, compilations in run_ranks(
        count_executions, ranks, tmp_path, accumulative_counts, **job
    ):
        assert len(executions) >= 30
        assert set(executions) == expected
        assert compilations == 0
