"""DeviceHook finds what is on another device, and moves it."""

import logging

import pytest
import torch
from mmengine.registry import RUNNERS

from tests.jobs import PLAIN, digits_config, install_card
from tests.ranks import run_ranks


def train_with_misplaced_parts(work_dir):
    install_card('zeta')
    cfg = digits_config('zeta', work_dir, **PLAIN)
    cfg.custom_hooks = [dict(type='EmptyCacheHook', after_iter=True)]
    runner = RUNNERS.build(cfg)
    messages, emptied = [], []
    torch.zeta.empty_cache = lambda: emptied.append(runner.iter)
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    runner.logger.addHandler(handler)
    model = getattr(runner.model, 'module', runner.model)
    model.head.weight = torch.nn.Parameter(model.head.weight.detach().cpu())
    model.data_preprocessor._device = torch.device('cpu')
    runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
    optimizer = runner.optim_wrapper.optimizer
    parameter = next(p for p in model.parameters() if p is not model.head.weight)
    state = dict(momentum_buffer=torch.zeros(parameter.shape), step=torch.tensor(1.0))
    optimizer.state[parameter].update(state)
    runner.train()
    # Where Adam counts.
    assert runner.optim_wrapper.optimizer.state[parameter].pop('step').device.type == 'cpu'
    devices = {str(value.device) for value in model.state_dict().values()}
    states = {
        str(value.device)
        for state in runner.optim_wrapper.optimizer.state.values()
        for value in state.values()
    }
    assert {*emptied} >= {*range(runner.iter)}  # MMEngine's empties that of CUDA alone
    return devices | states, messages


@pytest.mark.parametrize('ranks', [0, 2])
def test_repairs(tmp_path, ranks):
    for rank, (devices, messages) in enumerate(
        run_ranks(train_with_misplaced_parts, ranks, tmp_path)
    ):
        assert devices == {f'zeta:{rank}'}
        if rank == 0:
            problems = [message for message in messages if message.startswith('not on zeta:0')]
            assert len(problems) == 1
            assert 'head.weight on cpu' in problems[0]
            assert 'data_preprocessor (data preprocessor) on cpu' in problems[0]
            assert 'SGD state momentum_buffer of parameter 0 on cpu' in problems[0]
