"""What the tests on TorchTPU run in the processes of a job: scenarios of other tests, on ``tpu``."""

from tests.checkpoint.training import train
from tests.device_guard.test_guard_legal import guarded_digits
from tests.features.rows import train_rows
from tests.jobs import PLAIN, train_digits

#: Rows of the feature table.
ROWS = ['sgd', 'clip_norm', 'ema', 'amp', 'sync_bn', 'unused']
EVERY_THIRD = dict(interval=3, by_epoch=False)
OVER_GLOO = dict(accelerator__type='tpu', accelerator__backend='gloo')


def digits(work_dir, **options):
    """Two epochs of the digits example."""
    options = dict(OVER_GLOO, train_cfg__max_epochs=2, default_hooks__checkpoint=None, **options)
    found = train_digits('tpu', work_dir, 256, **options)
    return {key: found[key] for key in ('accuracy', 'device', 'wrapper', 'staged')}


def resumed(work_dir, stop_at=None, accelerator='tpu', **options):
    """A training with dropout, averaged weights and clipping, perhaps until a rank dies."""
    hooks = [dict(type='EMAHook', momentum=0.1)]
    if stop_at is not None:
        hooks.append(dict(type='DieAt', iteration=stop_at))
    return train(
        work_dir,
        accelerator,
        by_epoch=False,
        length=12,
        checkpoint=EVERY_THIRD,
        custom_hooks=hooks,
        **options,
    )


def alone(folder):
    """What one process does."""
    from mmdevplug.accelerators import get_accelerator

    accelerator = get_accelerator('tpu')
    found = dict(digits=digits(folder / 'digits'))
    device = accelerator.device()
    found['memory'] = [accelerator.memory_total(device), accelerator.memory_allocated(device)]
    found['guard'] = guarded_digits('tpu', folder / 'guard')
    compiled = dict(PLAIN, train_cfg__max_epochs=1)
    found['compiled'] = [
        train_digits('tpu', folder / ('compiled' if options else 'plain'), 512, **compiled, **options)['weights']
        for options in ({}, dict(compile=dict(target='forward')))
    ]
    return found


def together(folder):
    """What each of two ranks does."""
    return dict(digits=digits(folder / 'digits'), rows=train_rows(ROWS, 'tpu', folder / 'rows'))
