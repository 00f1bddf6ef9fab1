"""Results of metrics on their way to the host."""

from collections import defaultdict, namedtuple
from types import SimpleNamespace

import pytest
import torch
from mmengine.structures import InstanceData

from tests.columns import CUDA, NATIVE
from tests.jobs import install_card
from tests.ranks import in_ranks

Pair = namedtuple('Pair', 'scores label')


@pytest.mark.parametrize('accelerator', ['zeta', NATIVE, CUDA])
@in_ranks()
def test_nested_results_keep_their_shape(accelerator):
    from mmdevplug import init_device
    from mmdevplug.hooks.results_hook import ResultsHook

    install_card(accelerator)
    device = init_device('none', accelerator).accelerator.device(1)
    shared = torch.arange(3.0, device=device)
    old = [torch.zeros(1, device=device)]
    metric = SimpleNamespace(results=old)
    evaluator = SimpleNamespace(metrics=[metric, SimpleNamespace(results=None)])
    runner, hook = SimpleNamespace(val_loop=SimpleNamespace(evaluator=evaluator)), ResultsHook()
    hook.before_val_iter(runner)
    boxes = InstanceData(boxes=torch.ones(2, 4, device=device), labels=torch.tensor([1, 2]))
    nested = defaultdict(list, boxes=boxes, pair=Pair(shared, 3), again=[shared, ('a', None)])
    metric.results.append(nested)
    hook.after_val_iter(runner)
    first, new = metric.results
    assert dict(
        same_list=metric.results is old,
        before=first.device.type,
        types=[type(new).__name__, type(new['pair']).__name__, type(new['boxes']).__name__],
        devices={
            tensor.device.type
            for tensor in (new['boxes'].boxes, new['boxes'].labels, new['pair'].scores)
        },
        values=[new['boxes'].boxes.sum().item(), new['pair'].scores.tolist(), new['pair'].label],
        shared=new['pair'].scores is new['again'][0],
        rest=new['again'][1],
        source=boxes.boxes.device.type,
    ) == dict(
        same_list=True,
        before=accelerator,  # of an earlier batch
        types=['defaultdict', 'Pair', 'InstanceData'],
        devices={'cpu'},
        values=[8.0, [0.0, 1.0, 2.0], 3],
        shared=True,
        rest=('a', None),
        source=accelerator,
    )
