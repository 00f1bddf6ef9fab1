"""Deformable attention on torch_xla: values, gradients, and what it executes."""

import pytest
import torch

from tests.ranks import in_ranks
from tests.xla.executions import counts

pytestmark = pytest.mark.xla

MAPS = [(4, 6), (2, 3)]


def attend(kind):
    """Attend to two maps twice.

    Returns:
        tuple: The output and gradients; executions of the second time; operators of the host.
    """
    from mmcv.ops import MultiScaleDeformableAttention
    from torch_xla.debug import metrics

    from mmdevplug import init_device
    from mmdevplug.model.place_model import place_model

    torch.manual_seed(0)
    layer = MultiScaleDeformableAttention(
        embed_dims=8, num_heads=2, num_levels=2, num_points=2, dropout=0.0, batch_first=True
    )
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    context = init_device('none', kind)
    layer = place_model(layer, context)
    maps = [torch.rand(1, 8, *size).to(context.device) for size in MAPS]
    points = torch.rand(1, 5, 2, 2).to(context.device)
    executions = []
    for _ in range(2):
        if kind == 'xla':
            executions.append(counts()[0])
        layer.zero_grad()
        sizes = [torch._shape_as_tensor(each)[2:].to(each.device) for each in maps]
        value = torch.cat([each.flatten(2).transpose(1, 2) for each in maps], 1)
        found = layer(
            value[:, :5],
            value=value,
            reference_points=points,
            spatial_shapes=torch.cat(sizes).view(-1, 2),
        )
        found.square().sum().backward()
        context.materialize()
    if kind == 'xla':
        executions.append(counts()[0])
    on_host = [name for name in metrics.counter_names() if 'grid_sampler' in name]
    results = [found.detach(), *(p.grad for p in layer.parameters())]
    return [part.cpu() for part in results], executions[-1:], executions[-2:-1], on_host


@pytest.mark.operators
@in_ranks(environ=dict(CPU_NUM_DEVICES='1'))
def test_one_execution_with_the_results_of_the_host():
    # Autograd starts a thread for each device that there is when it is first used.
    found, end, begin, on_host = attend('xla')
    expected, *_ = attend('cpu')
    assert len(expected) == len(found) == 9
    for one, other in zip(expected, found):
        assert torch.allclose(one, other, atol=1e-4)
    assert [after - before for before, after in zip(begin, end)] == [1]
    assert on_host == []
