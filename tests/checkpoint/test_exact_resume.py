"""A run that is killed and resumed ends with the same bits as one that is not."""

import time

import mmengine
import pytest
from mmengine.runner import IterBasedTrainLoop

from tests.checkpoint import kept_cases  # noqa: F401  registers Keeps
from tests.checkpoint.training import SAMPLES, assert_equal_bits, build, train
from tests.columns import NATIVE, job_of, lazy
from tests.jobs import needs_later_loops, note
from tests.ranks import RanksFailed, in_ranks, run_ranks

EVERY_THIRD = dict(interval=3, by_epoch=False, save_best='auto', rule='less', max_keep_ckpts=2)
EMA = dict(type='EMAHook', momentum=0.1)
#: Several buckets, which PyTorch's DDP rearranges after the first backward pass.
SEVERAL_BUCKETS = dict(
    # With plain attributes, which that pass must leave as they were.
    model=dict(type='Keeps', width=64),
    model_wrapper_cfg=dict(type='DeviceDistributedDataParallel', bucket_cap_mb=0.01),
)

#: MMEngine's own wrapper of optimizers on devices that it knows, ours on others.
SCALED = dict(
    optim_wrapper__type='AmpOptimWrapper',
    optim_wrapper__dtype='float16',
    optim_wrapper__loss_scale=dict(init_scale=256.0, growth_interval=5),
)


def on_ranks(world_size, work_dir, options):
    job = job_of(options.get('accelerator', 'cpu'), world_size)
    return run_ranks(_train, world_size, work_dir, options, **job)


def _train(work_dir, options):
    """In a process that imports this module, which registers what is trained."""
    return train(work_dir, **options)


def train_until_death(world_size, work_dir, options, **hook):
    """Train until a hook ends a rank."""
    with pytest.raises(RanksFailed):
        on_ranks(world_size, work_dir, dict(options, custom_hooks=[EMA, hook]))


def check_killed(world_size, folder, options, **hook):
    """Compare a whole run with one that a hook ends and that is resumed."""
    expected = on_ranks(world_size, folder / 'whole', options)
    train_until_death(world_size, folder / 'killed', options, **hook)
    found = on_ranks(world_size, folder / 'killed', dict(options, resume=True))
    assert_equal_bits(expected, found)


@pytest.mark.parametrize(
    ('by_epoch', 'die_at', 'workers'),
    # In the middle of an epoch of 13 batches, at its end, and just after a checkpoint.
    [(True, 20, 0), (True, 26, 2), (True, 9, 0), (False, 10, 2), (False, 12, 0)],
)
def test_a_single_process(tmp_path, by_epoch, die_at, workers):
    options = dict(
        by_epoch=by_epoch, train_dataloader__num_workers=workers, checkpoint=EVERY_THIRD
    )
    check_killed(0, tmp_path, options, type='DieAt', iteration=die_at)


def _train_on_a_fork(work_dir, options):
    """With the loop of MMEngine before 0.10.3, in a fork that counts its releases otherwise."""
    mmengine.__version__ = '1.0.0'
    IterBasedTrainLoop.run = _drop_no_batches
    return train(work_dir, **options)


def _drop_no_batches(loop):
    loop.runner.call_hook('before_train')
    loop.runner.call_hook('before_train_epoch')
    while loop.iter < loop.max_iters:
        loop.run_iter(next(loop.dataloader_iterator))
    loop.runner.call_hook('after_train_epoch')
    loop.runner.call_hook('after_train')


def test_a_fork_whose_loop_drops_no_batches(tmp_path):
    options = dict(by_epoch=False, checkpoint=dict(interval=3, by_epoch=False))
    expected = run_ranks(_train_on_a_fork, 0, tmp_path / 'whole', options)
    killed = dict(options, custom_hooks=[EMA, dict(type='DieAt', iteration=10)])
    with pytest.raises(RanksFailed):
        run_ranks(_train_on_a_fork, 0, tmp_path / 'killed', killed)
    found = run_ranks(_train_on_a_fork, 0, tmp_path / 'killed', dict(options, resume=True))
    assert_equal_bits(expected, found)


# Of more than two, whose sums depend on the order of DDP's buckets.
@pytest.mark.parametrize(('world_size', 'accumulated'), [(3, 1), (4, 3)])
@pytest.mark.parametrize('by_epoch', [True, False])
def test_several_ranks(tmp_path, world_size, accumulated, by_epoch):
    options = dict(by_epoch=by_epoch, checkpoint=EVERY_THIRD, **SEVERAL_BUCKETS)
    options['optim_wrapper__accumulative_counts'] = accumulated
    # Workers of each rank draw random numbers of their own.
    options['train_dataloader__num_workers'] = 1
    # Since the last validation each rank has its own running statistics.
    check_killed(world_size, tmp_path, options, type='DieAt', iteration=10, rank=world_size - 1)


@pytest.mark.parametrize('async_save', [False, True])
def test_between_epochs_with_validation_pending(tmp_path, async_save):
    options = dict(
        checkpoint=dict(interval=1, save_best='auto', rule='less', async_save=async_save),
        # Its steps depend on the validation that the killed run has not come to.
        param_scheduler=[
            dict(type='ReduceOnPlateauLR', monitor='loss_error', rule='less', patience=0)
        ],
    )
    check_killed(0, tmp_path, options, type='DieBeforeVal', epoch=2)


def test_a_seed_that_nobody_chose(tmp_path):
    """The resumed run finds a new seed at its start, and goes back to the one it had."""
    options = dict(checkpoint=EVERY_THIRD, randomness={}, by_epoch=False)
    first = on_ranks(2, tmp_path, options)
    # From its 21st iteration, the last checkpoint but one.
    (tmp_path / 'iter_24.pth').unlink()
    again = on_ranks(2, tmp_path, dict(options, resume=True))
    assert_equal_bits(first, again)


@pytest.mark.parametrize(
    ('accelerator', 'world_size', 'more'),
    [
        ('zeta', 1, {}),
        ('zeta', 2, {}),
        lazy('lazy', 2, {}),
        (NATIVE, 2, SCALED),
        pytest.param(NATIVE, 4, SEVERAL_BUCKETS, marks=pytest.mark.long),
        pytest.param('cuda', 1, {}, marks=pytest.mark.cuda),
        pytest.param('cuda', 2, SCALED, marks=pytest.mark.cuda),
        pytest.param('cuda', 4, SEVERAL_BUCKETS, marks=pytest.mark.cuda),
    ],
)
def test_an_eager_card(tmp_path, accelerator, world_size, more):
    options = dict(accelerator=accelerator, checkpoint=EVERY_THIRD, by_epoch=False, **more)
    check_killed(world_size, tmp_path, options, type='DieAt', iteration=10)


def seen_samples(work_dir, options):
    """The samples that this rank trains on from its start, by their index in the dataset."""
    runner = build(work_dir, **options)
    seen = note(
        runner,
        'before_train_iter',
        lambda _, batch_idx, data_batch: (batch_idx, data_batch['targets'][:, 0].tolist()),
    )
    runner.train()
    return seen


def test_other_world_sizes_go_on_after_the_same_samples(tmp_path):
    options = dict(length=1, checkpoint=dict(interval=2, by_epoch=False))
    whole = run_ranks(seen_samples, 2, tmp_path / 'whole', options)
    train_until_death(2, tmp_path / 'killed', options, type='DieAt', iteration=3)
    (rest,) = run_ranks(seen_samples, 1, tmp_path / 'killed', dict(options, resume=True))
    # Two batches of each of two ranks are four of a single one.
    assert rest[0][0] == 4
    before = {x for batches in whole for _, batch in batches[:2] for x in batch}
    after = [x for _, batch in rest for x in batch]
    assert not before & set(after)
    assert len(before) + len(after) == SAMPLES


def calls_of(work_dir, options):
    """Train; return the number of validations and of iterations, where it ended, and the log."""
    runner = build(work_dir, **dict(options, log_level='INFO'))
    validations = note(runner, 'before_val', lambda runner: runner.iter)
    iterations = note(runner, 'after_train_iter', lambda runner, **_: runner.iter)
    runner.train()
    log = max(work_dir.glob('*/*.log'), key=lambda path: path.stat().st_mtime_ns)
    return len(validations), len(iterations), runner.iter, log.read_text()


@pytest.mark.parametrize('by_epoch', [True, False])
@in_ranks()
def test_a_finished_run_is_not_validated_again(tmp_path, by_epoch):
    """A whole run, the same resumed twice, and then a longer one."""
    options = dict(
        by_epoch=by_epoch,
        length=2 if by_epoch else 6,
        checkpoint=dict(interval=1 if by_epoch else 3, by_epoch=by_epoch),
    )
    found = [calls_of(tmp_path, options)]
    for length in (options['length'], options['length'], 2 * options['length']):
        time.sleep(1.1)  # runs are distinguished by the second
        found.append(calls_of(tmp_path, dict(options, resume=True, length=length)))
    (validations, _, end, _), *again, (_, iterations, longer_end, log) = found
    assert validations
    for *numbers, log_again in again:
        assert numbers == [0, 0, end]
        assert 'This run was already finished' in log_again
    assert iterations == end
    assert longer_end == 2 * end
    assert 'already finished' not in log


@needs_later_loops
def test_the_last_validation_of_a_killed_run_is_done_after_resuming(tmp_path):
    """Also where an earlier run of the same length has finished in that folder."""
    options = dict(length=2, train_cfg__val_interval=3)  # MMEngine validates at the end, too
    on_ranks(0, tmp_path, options)
    train_until_death(0, tmp_path, options, type='DieBeforeVal', epoch=2)
    for expected in (1, 0):
        ((validations, _, _, log),) = run_ranks(calls_of, 0, tmp_path, dict(options, resume=True))
        assert validations == expected
        said = 'saved before the validation that followed, and has no results of it'
        assert said in log or not expected
