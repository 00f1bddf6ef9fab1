"""Mixed precision where MMEngine offers none: scaling, refusals, autocast in models."""

import logging
from functools import partial

import pytest
import torch
from mmengine.config import Config, ConfigDict
from mmengine.logging import MMLogger
from mmengine.optim import AmpOptimWrapper, OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS
from mmengine.runner.amp import autocast
from torch import nn

from mmdevplug import init_device, patch_mmengine
from mmdevplug.accelerators import DeviceContext, get_accelerator, set_device_context
from mmdevplug.accelerators.lazy import LazyCompilation
from mmdevplug.errors import AcceleratorError, ModelError
from mmdevplug.optim import (
    DeviceAmpOptimWrapper,
    DeviceOptimWrapper,
    adapt_optim_wrapper_cfg,
    use_amp,
)
from mmdevplug.patches.autocast import patch_autocast
from mmdevplug.patches.mmengine import restore_mmengine
from tests.cli.running import PLAIN, SHORT, STANDIN, config
from tests.columns import CUDA, NATIVE, amp_wrapper, job_of, on_xla
from tests.commands import environment, python
from tests.jobs import install_card, load_file, messages_of, needs_scaler, start
from tests.optim.scenarios import cast_inside, check_skipped, overflow
from tests.ranks import in_ranks, run_ranks

# overflow ---------------------------------------------------------------------------------------


@needs_scaler
@pytest.mark.parametrize('clip', [False, True])
@pytest.mark.parametrize('accelerator', ['cpu', 'zeta', NATIVE, CUDA])
def test_all_ranks_skip_the_step_in_which_one_overflowed(tmp_path, accelerator, clip):
    options = dict(clip_grad=dict(max_norm=0.2)) if clip else {}
    train = partial(overflow, dtype='float16', **options)
    results = run_ranks(train, 2, accelerator, tmp_path, **job_of(accelerator))
    check_skipped(results)
    assert {result['wrapper'] for result in results} == {amp_wrapper(accelerator)}
    if clip:
        assert [not torch.tensor(norm).isfinite() for norm in results[0]['norms']].index(True) == 5


@needs_scaler
@pytest.mark.parametrize('accelerator', ['cpu', 'zeta', NATIVE, CUDA])
@in_ranks(2)
def test_ranks_agree_on_an_overflow_of_one_of_them(accelerator):
    """Parameters that every rank keeps for itself; rank 0 overflows, and then no rank."""
    context = start(accelerator)
    for overflows_on, expected in ((0, (True, 4.0)), (None, (False, 8.0))):
        torch.manual_seed(0)
        model = nn.Linear(3, 2).to(context.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapper = DeviceAmpOptimWrapper(
            optimizer=optimizer, dtype='float16', loss_scale=dict(init_scale=8.0)
        )
        before = model.weight.detach().cpu().clone()
        loss = model(torch.ones(1, 3, device=context.device)).sum()
        wrapper.update_params(loss * float('inf') if context.env.rank == overflows_on else loss)
        same = torch.equal(before, model.weight.detach().cpu())
        assert (same, wrapper.loss_scaler.get_scale()) == expected


# the wrapper ------------------------------------------------------------------------------------


@pytest.fixture
def on_cpu():
    cpu = get_accelerator('cpu')
    set_device_context(DeviceContext(cpu, 'a test', cpu.device(0)))
    yield
    set_device_context(None)


@needs_scaler
def test_gradients_are_unscaled_before_they_are_clipped(on_cpu):
    updated = []
    kinds = (OptimWrapper, partial(DeviceAmpOptimWrapper, dtype='float16', loss_scale=256.0))
    for kind in kinds:
        weight = nn.Parameter(torch.ones(4))
        wrapper = kind(optimizer=torch.optim.SGD([weight], lr=1.0), clip_grad=dict(max_norm=1.0))
        wrapper.update_params(weight.sum() * 0.25)  # a norm of 0.5
        updated.append(weight.detach())
    assert torch.equal(*updated)


def build(**kwargs):
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    cfg = dict(type='DeviceAmpOptimWrapper', optimizer=optimizer, **kwargs)
    return OPTIM_WRAPPERS.build(cfg)


@needs_scaler
def test_loss_scale_means_what_it_means_in_mmengine(on_cpu):
    def scale_after_a_step(slope=1.0, **kwargs):
        wrapper = build(dtype='float16', **kwargs)
        weight = wrapper.optimizer.param_groups[0]['params'][0]
        wrapper.update_params(weight.sum() * slope)
        return wrapper.loss_scaler.get_scale()

    assert scale_after_a_step() == scale_after_a_step(loss_scale='dynamic') == 2.0**16
    assert scale_after_a_step(loss_scale=512.0) == 512.0
    inf = float('inf')
    assert scale_after_a_step(inf) == 2.0**15
    assert scale_after_a_step(inf, loss_scale=512.0) == 512.0
    growing = dict(init_scale=4.0, growth_interval=1, growth_factor=4.0)
    assert scale_after_a_step(loss_scale=growing) == 16.0


@pytest.mark.parametrize('dtype', ['bfloat16', torch.bfloat16, None])
def test_bfloat16_scales_nothing_and_says_what_it_ignores(on_cpu, dtype):
    with messages_of(MMLogger.get_current_instance(), logging.WARNING) as messages:
        wrapper = build(dtype=dtype)
        assert messages == []
        build(dtype=dtype, loss_scale=512.0)
    assert len(messages) == 1
    assert 'optim_wrapper.loss_scale=512.0 is ignored' in messages[0]
    assert isinstance(wrapper, AmpOptimWrapper)
    assert wrapper.cast_dtype == torch.bfloat16
    assert wrapper.loss_scaler.get_scale() == 1.0
    assert 'loss_scaler' not in wrapper.state_dict()


@needs_scaler
def test_state_is_loaded_across_a_change_of_precision_either_way(on_cpu):
    wrapper, scaled = build(dtype='bfloat16'), build(dtype='float16', loss_scale=64.0)
    scaled.load_state_dict(wrapper.state_dict())
    wrapper.load_state_dict(scaled.state_dict())
    assert scaled.loss_scaler.get_scale() == 64.0


@pytest.mark.parametrize(
    ('kwargs', 'expected'),
    [
        (dict(dtype='float8'), r"optim_wrapper.dtype='float8': expected one of 'float16'"),
        (dict(dtype=torch.int8), r'optim_wrapper.dtype=torch.int8'),
        (dict(dtype=16), r'optim_wrapper.dtype=16'),
        (dict(loss_scale='static'), r"optim_wrapper.loss_scale='static': expected 'dynamic'"),
        (dict(loss_scale=0.0), r'optim_wrapper.loss_scale=0.0'),
        (dict(loss_scale=float('nan')), r'optim_wrapper.loss_scale=nan'),
        (dict(loss_scale=True), r'optim_wrapper.loss_scale=True'),
        (dict(loss_scale=None), r'optim_wrapper.loss_scale=None'),
        pytest.param(
            dict(dtype='float16', loss_scale=dict(scale=2.0)),
            r"'scale'.*init_scale",
            marks=needs_scaler,
        ),
        pytest.param(
            dict(dtype='float16', loss_scale=dict(growth_factor=0.5)),
            r'growth_factor > 1',
            marks=needs_scaler,
        ),
    ],
)
def test_invalid_values_are_refused_with_key_value_and_what_is_expected(on_cpu, kwargs, expected):
    with pytest.raises(ModelError, match=expected):
        build(**kwargs)


# what a config becomes --------------------------------------------------------------------------


class Lazy:
    """As far as the config is concerned."""

    compilation = LazyCompilation
    device_type = 'xla'


@pytest.mark.parametrize('kind', ['OptimWrapper', 'mmengine.OptimWrapper', OptimWrapper, None])
def test_plain_wrapper_is_replaced_on_lazy_devices_alone(kind):
    cfg = ConfigDict(optimizer=dict(type='SGD', lr=0.1))
    if kind is not None:
        cfg.type = kind
    assert adapt_optim_wrapper_cfg(cfg, Lazy)['type'] is DeviceOptimWrapper
    assert adapt_optim_wrapper_cfg(cfg, get_accelerator('cpu')) == cfg
    assert cfg.get('type') == kind


@pytest.mark.parametrize('kind', ['AmpOptimWrapper', AmpOptimWrapper])
def test_mixed_precision_is_replaced_where_mmengine_refuses_it(kind):
    cfg = dict(type=kind, optimizer=dict(type='SGD', lr=0.1))
    for accelerator in (Lazy, get_accelerator('cpu')):
        assert adapt_optim_wrapper_cfg(cfg, accelerator)['type'] is DeviceAmpOptimWrapper


def test_parts_of_a_config_for_several_optimizers_are_replaced_and_others_kept():
    cfg = ConfigDict(
        constructor='SomeConstructor',
        generator=dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.1)),
        discriminator=dict(type='AmpOptimWrapper', optimizer=dict(type='SGD', lr=0.1)),
        critic=dict(type='ApexOptimWrapper', optimizer=dict(type='SGD', lr=0.1)),
        untyped=dict(optimizer=dict(type='SGD', lr=0.1)),
        paramwise_cfg=dict(norm_decay_mult=0.0),
    )
    found = adapt_optim_wrapper_cfg(cfg, Lazy)
    assert 'type' not in found
    assert found['generator']['type'] is DeviceOptimWrapper
    assert found['discriminator']['type'] is DeviceAmpOptimWrapper
    assert found['untyped']['type'] is DeviceOptimWrapper
    assert found['critic'] == cfg['critic']
    assert cfg.generator.type == 'OptimWrapper'
    built = OptimWrapper(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    assert adapt_optim_wrapper_cfg(built, Lazy) is built


def test_amp_reaches_each_optimizer_and_names_what_it_cannot_replace():
    sgd = dict(type='SGD', lr=0.1)
    plain = Config(dict(optim_wrapper=dict(optimizer=sgd)))
    several = Config(
        dict(
            optim_wrapper=dict(
                constructor='Any',
                lr_schedule=dict(a=0.1),
                a=dict(type=OptimWrapper, optimizer=sgd),
                b=dict(optimizer=sgd, paramwise_cfg=dict(norm_decay_mult=0.0)),
                c=dict(type='mmengine.AmpOptimWrapper', optimizer=sgd),
                group=dict(d=dict(type='OptimWrapper', optimizer=sgd)),
            )
        )
    )
    for cfg in (plain, several):
        use_amp(cfg)
    assert plain.optim_wrapper.type == 'AmpOptimWrapper'
    found = several.optim_wrapper
    assert 'type' not in found
    assert {found.a.type, found.b.type, found.group.d.type} == {'AmpOptimWrapper'}
    assert found.c.type == 'mmengine.AmpOptimWrapper'
    for wrong, expected in (
        (dict(a=dict(type='ApexOptimWrapper', optimizer=sgd)), r"optim_wrapper\.a\.type='OptimWr"),
        (dict(constructor='Own'), r"an optimizer in optim_wrapper.*\['constructor'\]"),
    ):
        with pytest.raises(ModelError, match=expected):
            use_amp(Config(dict(optim_wrapper=wrong)))


# autocast inside models -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('accelerator', 'own'),
    [
        ('cpu', 'bfloat16'),
        ('zeta', 'float16'),
        on_xla('xla', 'bfloat16'),
        on_xla('gcu', 'float16'),
    ],
)
def test_autocast_inside_a_model(tmp_path, accelerator, own):
    (found,) = run_ranks(cast_inside, 0, accelerator, tmp_path, **job_of(accelerator, 0))
    assert found == [
        f'torch.{name}' for name in (own, 'float32', 'bfloat16', 'bfloat16', 'float32')
    ]


@in_ranks()
def test_a_second_call_patches_autocast_for_another_accelerator():
    install_card('zeta')
    found = []

    def cast():
        with autocast(dtype=torch.bfloat16):
            found.append([torch.is_autocast_enabled(kind) for kind in ('cpu', 'zeta')])

    init_device('none', 'zeta')
    for kind in ('zeta', 'cpu'):
        patch_mmengine(kind)
        cast()
    init_device('none', 'zeta')
    cast()
    restore_mmengine()
    assert found == [[False, True], [True, False], [False, True]]


@in_ranks()
def test_autocast_of_other_devices_stays_as_it_was():
    install_card('zeta')
    with pytest.raises(ValueError, match='cuda or cpu'), autocast(device_type='zeta'):
        pass
    accelerator = get_accelerator('zeta')
    set_device_context(DeviceContext(accelerator, 'a test', accelerator.device(0)))
    patch_autocast(accelerator)
    patch_autocast(accelerator)
    with autocast(device_type='zeta', dtype=torch.bfloat16):
        assert torch.is_autocast_enabled('zeta')
        assert torch.get_autocast_dtype('zeta') == torch.bfloat16
    # A device that is not the accelerator's is MMEngine's business.
    with autocast(device_type='cpu'):
        assert torch.is_autocast_enabled('cpu')
        assert not torch.is_autocast_enabled('zeta')
    with pytest.raises(ValueError, match='cuda or cpu'), autocast(device_type='xpu'):
        pass
    with pytest.raises(KeyError), autocast():
        raise KeyError
    assert not torch.is_autocast_enabled('zeta')
    # Where the vendor offers none, it can be switched off but not on.
    del torch.zeta.get_amp_supported_dtype
    with autocast(enabled=False):
        pass
    with pytest.raises(AcceleratorError, match="optim_wrapper.type='OptimWrapper'"), autocast():
        pass


@pytest.mark.long
@pytest.mark.parametrize('accelerator', ['cpu', 'zeta'])
def test_amp_on_the_command_line(tmp_path, accelerator):
    imports = ['fakecard_from_env'] * (accelerator == 'zeta')
    done = python(
        '-m', 'mmdevplug.cli.main', 'train', config(tmp_path, '', imports, base=PLAIN), '--amp',
        '--accelerator', accelerator, '--nproc', '2', '--work-dir', tmp_path, *SHORT,
        'model.channels=8', env=environment(STANDIN, FAKECARD_NAME='zeta'),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (checkpoint,) = tmp_path.glob('epoch_1.pth')
    saved = load_file(checkpoint, map_location='cpu')['optimizer']
    assert ('loss_scaler' in saved) == (accelerator == 'zeta')
