"""``compile`` of MMEngine's configs, with PyTorch's own compiler."""

import logging
import os
import re
import shutil
import sys
from functools import partial
from inspect import signature

import pytest
import torch
from mmengine.registry import MODELS
from mmengine.runner.amp import autocast

from tests.features.parts import FeatureNet
from tests.features.rows import row_config
from tests.jobs import ROOT, largest_difference, messages_of, torch_before, trained_weights
from tests.ranks import in_ranks, run_ranks

pytestmark = pytest.mark.skipif(
    torch_before('2.4.0'), reason="the compiler of PyTorch 2.1 fails in PyTorch's own SGD"
)


AOT_EAGER = dict(backend='aot_eager')
#: PyTorch 2.15 on Python 3.13 cannot compile `torch.cuda.amp.autocast(...)`, also without us.
of_cuda = torch.cuda.amp.autocast
if hasattr(torch, 'accelerator') and 'dtype' not in signature(of_cuda).parameters:
    of_cuda = partial(torch.autocast, 'cuda')


@MODELS.register_module(force=True)
class CastsInside(FeatureNet):
    """As models of mmdet and mmseg do, whose losses are in float32."""

    def features(self, inputs):
        features = super().features(inputs)
        with autocast(enabled=False):
            features = features.float() * 1.0
        with of_cuda(enabled=False):
            return features * 1.0


def train_compiled(compile_cfg, work_dir, row='sgd', **options):
    from torch._dynamo import trace_rules
    from torch._dynamo.utils import counters

    # As where the environment lies in a checkout of this project: PyTorch names the files of the
    # standard library that it skips, and 'mmdevplug' is in each of them.
    trace_rules.SKIP_DIRS.append('/home/somebody/mmdevplug/.venv/lib/python3/abc.py')

    from mmdevplug.runner import DeviceRunner
    from tests.features import parts  # noqa: F401

    cfg = row_config(row, 'cpu', work_dir)
    cfg.compile = compile_cfg
    for key, value in options.items():
        cfg[key] = value
    runner = DeviceRunner.from_cfg(cfg)
    torch._logging.set_logs(graph_breaks=True)
    log = logging.getLogger('torch._dynamo.symbolic_convert.__graph_breaks')
    log.handlers.clear()
    with messages_of(log) as told:
        runner.train()
    places = re.findall('in user code at (.*)', '\n'.join(told))
    assert bool(places) == bool(compile_cfg and not torch_before('2.6.0'))  # told in other words
    package = os.path.dirname(sys.modules['mmdevplug'].__file__)
    assert not [place for place in places if place.startswith(package)], places
    return (
        trained_weights(runner),
        counters['stats']['unique_graphs'],
        sorted(counters['graph_break']),
    )


needs_compiler = pytest.mark.skipif(
    shutil.which('gcc') is None, reason='inductor needs a C++ compiler'
)


@pytest.mark.parametrize(
    'compile_cfg',
    [AOT_EAGER, pytest.param(True, marks=needs_compiler)],
    ids=['aot_eager', 'inductor'],
)
def test_two_compiled_ranks_equal_one_process(tmp_path, compile_cfg):
    ((expected, graphs, _),) = run_ranks(train_compiled, 0, False, tmp_path / 'one')
    assert graphs == 0
    found = run_ranks(train_compiled, 2, compile_cfg, tmp_path / 'two', timeout=280)
    for weights, graphs, breaks in found:
        assert graphs > 0
        assert largest_difference(weights, expected) <= 1e-5
        # Of the averaging: MMEngine's own reasons are backward() and reading the losses.
        assert not [text for text in breaks if 'GradBucket' in text or 'collective' in text]


def train_with_amp(compile_cfg, work_dir):
    options = dict(model=dict(type='CastsInside', norm=True), sync_bn='auto')
    options['custom_hooks'] = [dict(type='EMAHook', momentum=0.1)]
    return train_compiled(compile_cfg, work_dir, 'amp', **options)


@pytest.mark.parametrize('ranks', [0, 2])
def test_mixed_precision_is_compiled(tmp_path, ranks):
    """MMEngine's own `autocast` parses versions, which the compiler refuses: InvalidVersion."""
    eager = run_ranks(train_with_amp, ranks, False, tmp_path / 'eager')
    compiled = run_ranks(train_with_amp, ranks, AOT_EAGER, tmp_path / 'compiled')
    for (weights, graphs, breaks), (expected, _, _) in zip(compiled, eager):
        assert graphs > 0
        assert largest_difference(weights, expected) <= 1e-3
        # Of ours only the wrapper is no graph, nor the exchange of all ranks' statistics.
        # By the folder of the package: that of the environment may lie in one of this name.
        package = f'{ROOT}/mmdevplug/'
        names = [package] if torch_before('2.6.0') else [package, 'autocast']
        ours = [text for text in breaks if any(name in text for name in names)]
        assert not [t for t in ours if '/sync_bn.py' not in t and '/wrapper.py' not in t], ours


def test_parameter_groups_of_a_config_are_compiled(tmp_path):
    """The compiler of PyTorch 2.13 knows no `ConfigDict`, of which MMEngine makes them."""
    adam = dict(type='AdamW', lr=1e-3, weight_decay=0.01)
    groups = dict(optimizer=adam, paramwise_cfg=dict(bias_decay_mult=0.0))
    options = dict(optim_wrapper=dict(type='OptimWrapper', **groups))
    found = []
    for compile_cfg in (False, AOT_EAGER):
        args = compile_cfg, tmp_path / str(bool(compile_cfg))
        found += run_ranks(partial(train_compiled, **options), 0, *args)
    assert found[1][1] > 0
    assert largest_difference(found[0][0], found[1][0]) <= 1e-4


@pytest.mark.skipif(torch_before('2.7'), reason='compiles no context manager before PyTorch 2.7')
@in_ranks()
def test_mmengines_autocast_is_replaced_on_every_device_where_a_model_is_compiled():
    """On CUDA MMEngine's own wrapper casts, by this function."""
    from mmdevplug.accelerators import CPUAccelerator, DeviceContext, set_device_context
    from mmdevplug.patches import autocast as patch

    accelerator = CPUAccelerator()
    set_device_context(DeviceContext(accelerator, 'a test', accelerator.device()))
    patch.mmengine_supports = lambda accelerator: True
    before = [torch.autocast('cuda', enabled=False)(torch.mm), autocast(enabled=False)(torch.mm)]
    patch.patch_autocast(accelerator, compiled=True)
    patch.patch_cuda_autocast(accelerator)

    @torch.compile(backend='eager', fullgraph=True)
    def step(inputs):
        with autocast(dtype=torch.bfloat16):
            cast = inputs @ inputs
            with autocast(enabled=False):
                plain = inputs @ inputs
            with of_cuda(enabled=False):
                as_cuda = inputs @ inputs
            decorated = [function(inputs, inputs) for function in before]
        return cast, plain, as_cuda, *decorated, inputs @ inputs

    found = [result.dtype for result in step(torch.ones(2, 2))]
    assert found == [torch.bfloat16, *[torch.float32] * 5]
