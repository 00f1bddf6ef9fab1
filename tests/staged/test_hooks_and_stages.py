"""DDP's communication hooks give what they give over gloo; pipelines, what one process gives."""

import pytest
import torch
from torch import distributed as torch_dist, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import in_ranks, run_ranks

from .test_collectives import RELEASE, start

pipelining = pytest.importorskip('torch.distributed.pipelining')
pytestmark = pytest.mark.skipif(RELEASE < (2, 13), reason='pipelines as PyTorch 2.13 has them')


def make_hooks():
    """A state and a hook for each name."""

    def power(**options):
        return powerSGD_hook.PowerSGDState(
            None, start_powerSGD_iter=2, min_compression_rate=0.5, **options
        )

    alone, _ = torch_dist.new_subgroups(1)
    halves = default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)
    local = post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=2)
    return dict(
        allreduce=(None, default_hooks.allreduce_hook),
        fp16=(None, default_hooks.fp16_compress_hook),
        bf16=(None, default_hooks.bf16_compress_hook),  # PyTorch asks for NCCL
        per_tensor=(None, quantization_hooks.quantization_pertensor_hook),
        per_channel=(None, quantization_hooks.quantization_perchannel_hook),
        power=(power(matrix_approximation_rank=2), powerSGD_hook.powerSGD_hook),
        halved_power=(power(), halves),
        local=(local, post_localSGD_hook.post_localSGD_hook),
    )


def train_with_hooks(device):
    """Weights of this rank after some steps with each hook, or the error of PyTorch."""
    where, found = start(device), {}
    generator = torch.Generator().manual_seed(torch_dist.get_rank())
    for name, (state, hook) in make_hooks().items():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 8)).to(where)
        model = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        batches = torch.randn(5, 4, 12, generator=generator)
        try:
            model.register_comm_hook(state, hook)
            for batch in batches.to(where):
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
        except (RuntimeError, TypeError) as error:
            found[name] = str(error).splitlines()[0]
        else:
            found[name] = torch.cat([p.detach().cpu().flatten() for p in net.parameters()])
    return found


@pytest.mark.parametrize('device', ['cpu', 'zeta'])
def test_hooks_of_ddp_give_what_they_give_over_gloo(device):
    expected = run_ranks(train_with_hooks, 2, 'gloo')
    for found, of_gloo in zip(run_ranks(train_with_hooks, 2, device), expected):
        for name, weights in of_gloo.items():
            if isinstance(weights, str):
                assert found[name] == weights, name
            elif name == 'bf16' and isinstance(found[name], str):
                assert 'bfloat16' in found[name].lower()  # gloo takes it since PyTorch 2.15
            else:
                torch.testing.assert_close(found[name], weights, rtol=0, atol=1e-6, msg=name)
        assert len([name for name in of_gloo if torch.is_tensor(of_gloo[name])]) >= 5


def layers():
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)]


def batch():
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


def loss_of(outputs, targets):
    return (outputs - targets).square().mean()


@pytest.mark.parametrize('device', ['cpu', 'zeta', 'streams'])
@in_ranks(2)
def test_pipelines_give_what_one_process_gives(device):
    where = start(device)
    rank, inputs = torch_dist.get_rank(), batch().to(where)
    net = nn.Sequential(*layers())
    parts = [loss_of(net(part), part) for part in batch().chunk(4)]
    (sum(parts) / 4).backward()
    expected = [p.grad for p in net[2 * rank : 2 * rank + 2].parameters()]
    for schedule in (pipelining.ScheduleGPipe, pipelining.Schedule1F1B):
        stage = nn.Sequential(*layers()[2 * rank : 2 * rank + 2]).to(where)
        stages = pipelining.PipelineStage(stage, rank, 2, where)
        runs = schedule(stages, n_microbatches=4, loss_fn=loss_of)
        losses = []
        runs.step(inputs) if rank == 0 else runs.step(target=inputs, losses=losses)
        gradients = [p.grad.cpu() for p in stage.parameters()]
        torch.testing.assert_close(gradients, expected, rtol=1e-5, atol=1e-6)
        if rank == 1:
            losses = [loss.item() for loss in losses]
            assert losses == pytest.approx([float(part) for part in parts], rel=1e-5)
