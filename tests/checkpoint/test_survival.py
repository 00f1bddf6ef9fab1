"""Jobs that are killed again and again come to the same end, through torchrun's restarts.

SIGKILL hits one rank or all, at the end of random iterations and at every step of saving a
checkpoint. Half as many SIGTERMs stop training in good order; it goes on at once. Each job has
another schedule, all have mixed precision, averaged weights and clipped gradients.
``MMDEVPLUG_KILLS`` says how often, 18 times by default; `make test-kills` does it 100 times.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from mmengine.config import Config

from mmdevplug.checkpoint.reading import check_file, read_checkpoint
from tests.checkpoint.killing import make_plan, make_terminations
from tests.checkpoint.test_round_trip import check_equal
from tests.checkpoint.training import config
from tests.columns import CUDA, NATIVE, NATIVE_BACKENDS, gpus, job_of
from tests.jobs import PATHS, ROOT, torch_before
from tests.native import native_environment

pytestmark = pytest.mark.long

SEED = int(os.environ.get('MMDEVPLUG_SEED', '0'))
SCALE = float(os.environ.get('MMDEVPLUG_KILLS', '18')) / 100


def run_job(folder, world_size, kills, accelerator='cpu', length=48, terminations=0, **options):
    """Train under torchrun's agent.

    Returns:
        tuple: The last checkpoint, the kills that happened, and what was printed.
    """
    folder.mkdir()
    plan = dict(
        kills=make_plan(SEED + world_size, kills, world_size, horizon=10),
        terminations=make_terminations(SEED + world_size, terminations, world_size, length),
    )
    (folder / 'plan.json').write_text(json.dumps(plan))
    cfg = config(folder / 'work', accelerator, by_epoch=False, length=length, **options)
    cfg['custom_imports'] = dict(
        imports=['tests.checkpoint.training', 'tests.checkpoint.killing'],
        allow_failed_imports=False,
    )
    cfg['custom_hooks'].append(dict(type='KillByPlan', plan=str(folder / 'plan.json')))
    cfg['val_cfg'] = cfg['val_dataloader'] = cfg['val_evaluator'] = None
    cfg['train_cfg'].pop('val_interval')
    Config(cfg).dump(str(folder / 'config.py'))
    environ = dict(os.environ, PYTHONPATH=PATHS)
    if accelerator in NATIVE_BACKENDS:
        environ = native_environment(accelerator)
    environ.update(job_of(accelerator, world_size).get('environ', {}), OMP_NUM_THREADS='1')
    command = [sys.executable, '-m', 'tests.checkpoint.elastic', str(folder / 'config.py')]
    command += [str(world_size), str(kills)]
    done = subprocess.run(
        command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=1200
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed[-6000:]
    noted = folder / 'kills.txt'
    lines = noted.read_text().splitlines() if kills else []
    # When all ranks are killed, more than one may have noted it.
    happened = list({kill['number']: kill for kill in map(json.loads, lines)}.values())
    last = (folder / 'work' / 'last_checkpoint').read_text()
    assert last.endswith(f'iter_{length}.pth')
    for path in (folder / 'work').glob('*.pth'):
        check_file(path)
    return read_checkpoint(last), happened, printed


def assert_equal_bits(one, other):
    """Weights, averaged weights, and the states of the optimizer and the schedules."""
    for key in ('state_dict', 'ema_state_dict', 'optimizer', 'param_schedulers'):
        check_equal(one[key], other[key], key)


def report(world_size, accelerator, happened, folder, capsys):
    looked = (folder / 'work' / 'looked.txt').read_text().split()
    places = dict(Counter(kill['place'] for kill in happened))
    terminated = [int(path.name.split('_')[-1]) for path in folder.glob('terminated_*')]
    stopped = [
        int(path.name.split('_')[-1])
        for path in folder.glob('stopped_*')
        for _ in path.read_text().splitlines()
    ]
    everyone = sum(len(kill['ranks']) == world_size for kill in happened)
    with capsys.disabled():
        print(
            f'\n{len(happened)} kills of {world_size} {accelerator} rank(s), {everyone} of them '
            f'of all ranks: {places}; {len(terminated)} SIGTERMs, {len(stopped)} orderly stops; '
            f'{sum(map(int, looked))} checkpoints read after kills, all whole.'
        )
    return terminated, stopped


CHECKPOINT = dict(interval=3, by_epoch=False, max_keep_ckpts=3)

#: World size, kills, half as many SIGTERMs, whether the background writes, the schedule.
JOBS = [
    (2, 50, False, 'MultiStepLR'),
    (2, 20, True, 'OneCycleLR'),
    (4, 30, False, 'CosineRestartLR'),
]
_HALF = 'bfloat16' if torch_before('2.3.0') else 'float16'  # which has no gradient scaler


def _schedule(kind, length):
    third = length // 3
    options = dict(
        MultiStepLR=dict(milestones=[third, 2 * third, length - 6], gamma=0.5),
        OneCycleLR=dict(eta_max=0.05, total_steps=length),
        CosineRestartLR=dict(
            periods=[third, third, length - 2 * third],
            restart_weights=[1, 0.5, 0.25],
            eta_min=0.001,
        ),
    )
    return [dict(options[kind], type=kind, by_epoch=False)]


@pytest.fixture(scope='module')
def jobs(tmp_path_factory):
    """For each of JOBS: a run that nothing happens to, one that is killed, and its folder."""
    folder = tmp_path_factory.mktemp('jobs')

    def run(number, kills_wanted):
        world_size, kills, async_save, kind = JOBS[number]
        kills = round(kills * SCALE)
        length = 9 * kills + 18
        # One begins passes over the data anew, the others have a sampler that never ends.
        sampler = dict(type='DefaultSampler' if number == 0 else 'InfiniteSampler', shuffle=True)
        wrapper = dict(type='AmpOptimWrapper', dtype=_HALF, clip_grad=dict(max_norm=1.0))
        if _HALF == 'float16':
            wrapper['loss_scale'] = dict(init_scale=256.0, growth_interval=7)
        return run_job(
            folder / f'{number}-{kills_wanted}',
            world_size,
            kills if kills_wanted else 0,
            length=length,
            terminations=kills // 2 if kills_wanted else 0,
            checkpoint=dict(CHECKPOINT, async_save=async_save),
            model=dict(type='NoisyModel', width=32),
            model_wrapper_cfg=dict(type='DeviceDistributedDataParallel', bucket_cap_mb=0.002),
            train_dataloader__sampler=sampler,
            optim_wrapper=dict(wrapper, optimizer=dict(type='AdamW', lr=0.02)),
            param_scheduler=_schedule(kind, length),
            resume=True,
        )

    # Two at a time: a job that starts again mostly waits.
    with ThreadPoolExecutor(2) as pool:
        started = {
            (number, kills): pool.submit(run, number, kills)
            for kills in (True, False)
            for number in range(len(JOBS))
        }
    return folder, {key: job.result() for key, job in started.items()}


@pytest.mark.timeout(1500)
@pytest.mark.parametrize('number', range(len(JOBS)), ids=[str(job) for job in JOBS])
def test_killed_again_and_again(jobs, capsys, number):
    folder, results = jobs
    world_size, kills, _, _ = JOBS[number]
    kills = round(kills * SCALE)
    expected, _, _ = results[number, False]
    got, happened, _ = results[number, True]
    assert_equal_bits(got, expected)
    terminated, stopped = report(world_size, 'cpu', happened, folder / f'{number}-True', capsys)
    # A rank may end with its killed neighbour before its own turn comes.
    assert len(happened) >= kills * 0.9
    assert len(terminated) == kills // 2
    assert stopped
    # Each SIGTERM ends its attempt in good order, unless SIGKILL comes before.
    assert {*terminated} <= {*stopped, *(kill['number'] for kill in happened)}


def test_a_restart_before_the_first_checkpoint_keeps_what_was_loaded(tmp_path, monkeypatch):
    options = dict(length=6, checkpoint=CHECKPOINT)
    run_job(tmp_path / 'pretrained', 2, 0, **options)
    options['load_from'] = str(tmp_path / 'pretrained' / 'work' / 'iter_6.pth')
    options['resume'] = False
    expected, _, _ = run_job(tmp_path / 'whole', 2, 0, **options)
    kill = dict(number=0, ranks=[1], place='iteration', after=2)
    monkeypatch.setattr(sys.modules[__name__], 'make_plan', lambda *_, **__: [kill])
    got, happened, printed = run_job(tmp_path / 'killed', 2, 1, **options)
    assert happened == [kill]
    assert_equal_bits(got, expected)


def kill_two_ranks(folder, capsys, accelerator, kills, **options):
    """The last checkpoints of a job that is killed and of one that is not."""
    options['checkpoint'] = CHECKPOINT
    expected, _, _ = run_job(folder / 'whole', 2, 0, accelerator, **options)
    got, happened, _ = run_job(folder / 'killed', 2, kills, accelerator, **options)
    report(2, accelerator, happened, folder / 'killed', capsys)
    assert len(happened) >= kills * 0.6
    return got, expected


@pytest.mark.timeout(1500)
@pytest.mark.parametrize('accelerator', [NATIVE, CUDA])
def test_killed_again_and_again_on_cards(tmp_path, capsys, accelerator):
    backend = NATIVE_BACKENDS.get(accelerator, 'nccl' if gpus() > 1 else 'gloo')
    options = dict(length=18, accelerator__backend=backend)
    assert_equal_bits(*kill_two_ranks(tmp_path, capsys, accelerator, 3, **options))


@pytest.mark.xla
@pytest.mark.timeout(1500)
def test_killed_again_and_again_on_lazy_devices(tmp_path, capsys):
    got, expected = kill_two_ranks(tmp_path, capsys, 'xla', 4, length=24)
    for name, value in got['state_dict'].items():
        assert (value.double() - expected['state_dict'][name].double()).abs().max() < 1e-5, name
