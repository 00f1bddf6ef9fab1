"""DeviceHook finds what is on another device, and moves it."""

import pytest
import torch
from mmengine.registry import RUNNERS

from mmdevplug.utils.model import unwrap_model
from tests.jobs import PLAIN, digits_config, install_card, messages_of
from tests.ranks import in_ranks


@pytest.mark.parametrize('ranks', [0, 2])
@in_ranks()
def test_repairs(tmp_path, ranks):
    install_card('zeta')
    cfg = digits_config('zeta', tmp_path, **PLAIN)
    cfg.custom_hooks = [dict(type='EmptyCacheHook', after_iter=True)]
    runner = RUNNERS.build(cfg)
    emptied = []
    torch.zeta.empty_cache = lambda: emptied.append(runner.iter)
    model = unwrap_model(runner.model)
    model.head.weight = torch.nn.Parameter(model.head.weight.detach().cpu())
    model.data_preprocessor._device = torch.device('cpu')
    runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
    optimizer = runner.optim_wrapper.optimizer
    parameter = next(p for p in model.parameters() if p is not model.head.weight)
    state = dict(momentum_buffer=torch.zeros(parameter.shape), step=torch.tensor(1.0))
    optimizer.state[parameter].update(state)
    with messages_of(runner.logger) as messages:
        runner.train()
    # Where Adam counts.
    assert optimizer.state[parameter].pop('step').device.type == 'cpu'
    states = [value for state in optimizer.state.values() for value in state.values()]
    devices = {str(value.device) for value in [*model.state_dict().values(), *states]}
    assert devices == {f'zeta:{runner.rank}'}
    assert {*emptied} >= {*range(runner.iter)}  # MMEngine's empties that of CUDA alone
    if runner.rank:
        return
    (problem,) = [message for message in messages if message.startswith('not on zeta:0')]
    assert 'head.weight on cpu' in problem
    assert 'data_preprocessor (data preprocessor) on cpu' in problem
    assert 'SGD state momentum_buffer of parameter 0 on cpu' in problem
