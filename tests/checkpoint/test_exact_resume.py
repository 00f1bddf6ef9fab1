"""A run that is killed and resumed ends with the same bits as one that is not."""

import time

import pytest
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from tests.checkpoint import kept_cases  # noqa: F401  registers Keeps
from tests.checkpoint.training import SAMPLES, build, train
from tests.columns import NATIVE, job_of, lazy
from tests.jobs import largest_difference, needs_scaler, note
from tests.ranks import RanksFailed, run_ranks

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


def interrupted(world_size, work_dir, die_at, options, rank=0):
    """Train until a rank dies, then resume."""
    dies = dict(options, custom_hooks=[EMA, dict(type='DieAt', iteration=die_at, rank=rank)])
    with pytest.raises(RanksFailed):
        on_ranks(world_size, work_dir, dies)
    return on_ranks(world_size, work_dir, dict(options, resume=True))


def assert_equal_bits(one, other):
    assert len(one) == len(other)
    for mine, theirs in zip(one, other):
        assert largest_difference(mine['weights'], theirs['weights']) == 0.0
        assert largest_difference(mine['ema'], theirs['ema']) == 0.0
        for name in ('iter', 'lr', 'draws', 'best'):
            assert mine[name] == theirs[name], name


@pytest.mark.parametrize(
    ('by_epoch', 'die_at', 'workers'),
    # In the middle of an epoch of 13 batches, at its end, and just after a checkpoint.
    [(True, 20, 0), (True, 26, 2), (True, 9, 0), (False, 10, 2), (False, 12, 0)],
)
def test_a_single_process(tmp_path, by_epoch, die_at, workers):
    options = dict(
        by_epoch=by_epoch, train_dataloader__num_workers=workers, checkpoint=EVERY_THIRD
    )
    expected = on_ranks(0, tmp_path / 'whole', options)
    assert_equal_bits(expected, interrupted(0, tmp_path / 'killed', die_at, options))


# Of more than two, whose sums depend on the order of DDP's buckets.
@pytest.mark.parametrize('world_size', [3, 4])
@pytest.mark.parametrize('by_epoch', [True, False])
def test_several_ranks(tmp_path, world_size, by_epoch):
    options = dict(by_epoch=by_epoch, checkpoint=EVERY_THIRD, **SEVERAL_BUCKETS)
    # Workers of each rank draw random numbers of their own.
    options['train_dataloader__num_workers'] = 1
    expected = on_ranks(world_size, tmp_path / 'whole', options)
    # Since the last validation each rank has its own running statistics.
    got = interrupted(world_size, tmp_path / 'killed', 10, options, rank=world_size - 1)
    assert_equal_bits(expected, got)


@pytest.mark.parametrize('async_save', [False, True])
def test_between_epochs_with_validation_pending(tmp_path, async_save):
    options = dict(
        checkpoint=dict(interval=1, save_best='auto', rule='less', async_save=async_save),
        # Its steps depend on the validation that the killed run has not come to.
        param_scheduler=[
            dict(type='ReduceOnPlateauLR', monitor='loss_error', rule='less', patience=0)
        ],
    )
    expected = on_ranks(0, tmp_path / 'whole', options)
    work_dir = tmp_path / 'killed'
    dies = dict(options, custom_hooks=[EMA, dict(type='DieBeforeVal', epoch=2)])
    with pytest.raises(RanksFailed):
        on_ranks(0, work_dir, dies)
    got = on_ranks(0, work_dir, dict(options, resume=True))
    assert_equal_bits(expected, got)


def test_a_seed_that_nobody_chose(tmp_path):
    """The resumed run finds a new seed at its start, and goes back to the one it had."""
    options = dict(checkpoint=EVERY_THIRD, randomness={}, by_epoch=False)
    first = on_ranks(2, tmp_path, options)
    # From its 21st iteration, the last checkpoint but one.
    (tmp_path / 'iter_24.pth').unlink()
    again = on_ranks(2, tmp_path, dict(options, resume=True))
    assert_equal_bits(first, again)


def test_pytorchs_own_sampler(tmp_path):
    """It shuffles by the generator that the model's dropout uses too."""
    options = dict(
        checkpoint=EVERY_THIRD, train_dataloader__sampler=dict(type='GlobalRandomSampler')
    )
    expected = on_ranks(0, tmp_path / 'whole', options)
    assert_equal_bits(expected, interrupted(0, tmp_path / 'killed', 20, options))


def test_gradients_that_accumulate(tmp_path):
    options = dict(
        checkpoint=dict(interval=4, by_epoch=False),
        optim_wrapper__accumulative_counts=2,
        by_epoch=False,
    )
    expected = on_ranks(0, tmp_path / 'whole', options)
    assert_equal_bits(expected, interrupted(0, tmp_path / 'killed', 10, options))


@needs_scaler
def test_mixed_precision(tmp_path):
    options = dict(checkpoint=EVERY_THIRD, by_epoch=False, **SCALED)
    expected = on_ranks(0, tmp_path / 'whole', options)
    assert_equal_bits(expected, interrupted(0, tmp_path / 'killed', 10, options))


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
    expected = on_ranks(world_size, tmp_path / 'whole', options)
    got = interrupted(world_size, tmp_path / 'killed', 10, options)
    assert_equal_bits(expected, got)


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


def cut_short(work_dir, options, iteration):
    """What two ranks see in a whole run; one of them dies in another, in the folder."""
    whole = run_ranks(seen_samples, 2, work_dir.with_name('whole'), options)
    dies = dict(options, custom_hooks=[dict(type='DieAt', iteration=iteration)])
    with pytest.raises(RanksFailed):
        run_ranks(seen_samples, 2, work_dir, dies)
    return whole


def test_no_sample_twice_and_none_left_out(tmp_path):
    options = dict(length=1, checkpoint=EVERY_THIRD)
    whole = cut_short(tmp_path / 'killed', options, 4)
    rest = run_ranks(seen_samples, 2, tmp_path / 'killed', dict(options, resume=True))
    assert [batches[3:] for batches in whole] == rest
    samples = [x for batches in whole for _, batch in batches for x in batch]
    assert len(samples) == len(set(samples)) == SAMPLES // 8 * 8


def test_other_world_sizes_go_on_after_the_same_samples(tmp_path):
    options = dict(length=1, checkpoint=dict(interval=2, by_epoch=False))
    whole = cut_short(tmp_path / 'killed', options, 3)
    (rest,) = run_ranks(seen_samples, 1, tmp_path / 'killed', dict(options, resume=True))
    # Two batches of each of two ranks are four of a single one.
    assert rest[0][0] == 4
    before = {x for batches in whole for _, batch in batches[:2] for x in batch}
    after = [x for _, batch in rest for x in batch]
    assert not before & set(after)
    assert len(before) + len(after) == SAMPLES


@HOOKS.register_module(force=True)
class CountCalls(Hook):
    """Writes down validations and iterations."""

    def __init__(self, path):
        self.path = path

    def _write(self, what):
        with open(self.path, 'a') as file:
            file.write(what)

    def before_val(self, runner):
        self._write('v')

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self._write('.')


def _finish_and_go_on(work_dir, options):
    """A whole run, the same resumed twice, and then a longer one."""
    counts = work_dir.parent / 'counts'
    options = dict(options, custom_hooks=[EMA, dict(type='CountCalls', path=str(counts))])
    results = []

    def run(**more):
        counts.write_text('')
        found = train(work_dir, **dict(options, log_level='INFO', **more))
        log = max(work_dir.glob('*/*.log'), key=lambda path: path.stat().st_mtime_ns)
        results.append((counts.read_text(), log.read_text(), found['iter']))

    run()
    for length in (options['length'], options['length'], 2 * options['length']):
        time.sleep(1.1)  # runs are distinguished by the second
        run(resume=True, length=length)
    return results


@pytest.mark.parametrize('by_epoch', [True, False])
def test_a_finished_run_is_not_validated_again(tmp_path, by_epoch):
    options = dict(
        by_epoch=by_epoch,
        length=2 if by_epoch else 6,
        checkpoint=dict(interval=1 if by_epoch else 3, by_epoch=by_epoch),
    )
    found = run_ranks(_finish_and_go_on, 0, tmp_path / 'work', options)[0]
    (first, _, iterations), *again, (longer, log, total) = found
    assert 'v' in first
    for calls, log_again, done in again:
        assert calls == ''
        assert 'This run was already finished' in log_again
        assert done == iterations
    assert longer.count('.') == iterations
    assert total == 2 * iterations
    assert 'already finished' not in log


def test_the_last_validation_of_a_killed_run_is_done_after_resuming(tmp_path):
    """Also where an earlier run of the same length has finished in that folder."""
    counts = tmp_path / 'counts'
    options = dict(length=2, train_cfg__val_interval=3)  # MMEngine validates at the end, too
    counted = dict(type='CountCalls', path=str(counts))
    on_ranks(0, tmp_path / 'work', options)
    dies = dict(options, custom_hooks=[EMA, dict(type='DieBeforeVal', epoch=2)])
    with pytest.raises(RanksFailed):
        on_ranks(0, tmp_path / 'work', dies)
    for expected in ('v', ''):
        counts.write_text('')
        resumed = dict(options, custom_hooks=[EMA, counted], resume=True, log_level='INFO')
        on_ranks(0, tmp_path / 'work', resumed)
        assert counts.read_text() == expected
        logs = ''.join(path.read_text() for path in (tmp_path / 'work').glob('*/*.log'))
        said = 'saved before the validation that followed, and has no results of it'
        assert said in logs or not expected
