"""Hundreds of missing, stale and contradictory launch variables, drawn by chance with a seed.

Each start either succeeds with the values it was given, or is refused with a message that names a
variable. None hangs, none dies and none ends with an error that is not ours.
"""

import json
import os
import random
import re
import runpy
import select
import signal
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mmdevplug import init_device
from mmdevplug.cli import hosts, launch
from mmdevplug.environments.launch_variables import refuse_to_run_alone
from mmdevplug.errors import DevPlugError, LaunchError
from tests import ranks
from tests.commands import python
from tests.environments.test_launch import NAMES
from tests.jobs import PATHS
from tests.ranks import PRELOAD, free_port

pytestmark = pytest.mark.long

CASES = 520
WORKERS = 6
#: How long ranks wait for one that does not exist, and for what a busy machine takes.
SHORT_TIMEOUT, TIMEOUT = 1, 40
#: Far beyond that, so that a busy machine is no failure.
HANGS_AFTER = 60
SCRIPT_CASES = 32
STARTS = 77  # the exit status that says so
#: Of the environments of test_launcher_choice.py, which name no launcher.
FOUND_CASES = 28

VALUES = (
    '', ' ', ' 2', '0', '1', '2', '3', '-1', 'abc', '99999999', '99999999999', '1.5', '0x1', '+1',
    '9' * 5000, '２', '²', 'ünï', '\udcff', '1\n2', 'None', 'True', '70000', '1e3', '1_0',
)  # fmt: skip
HOSTS = (
    '', ' ', '127.0.0.1', ' 127.0.0.1 ', 'localhost', '::1', '256.1.1.1', '127.0.0.9', '0', 'ünï',
    'no such host', 'nohost.invalid', '\udcff', 'x' * 300, '127.0.0.1:29500', '-', '[', 'a b',
)  # fmt: skip
NODELISTS = ('', 'node[1-2]', 'a,b', '127.0.0.1', '[', '$(touch hacked)', '-h', 'ünï')
TASKS = ('', '1', '2', '4', '1(x2)', '2(x1)', '0', '-1', '1,2', 'x', '9' * 5000)

AGENT = dict(ranks.AGENT, TORCHELASTIC_USE_AGENT_STORE='False')


def valid_variables(launcher, rank, world_size):
    """What the launcher of a job on one host sets."""
    if launcher == 'none':
        return {}
    values = map(str, (rank, world_size, rank, world_size))
    environ = dict(zip(NAMES[launcher], values), MASTER_ADDR='127.0.0.1', MASTER_PORT='PORT')
    if launcher == 'slurm':
        environ.update(SLURM_NODELIST='127.0.0.1', SLURM_NNODES='1', SLURM_JOB_ID='77')
    return environ


def values_for(name):
    if name == 'MASTER_ADDR':
        return HOSTS
    return {'SLURM_NODELIST': NODELISTS, 'SLURM_TASKS_PER_NODE': TASKS}.get(name, VALUES)


def draw_case(number):
    """One combination of variables, the same each time."""
    chance = random.Random(number)
    launcher = chance.choice(('none', 'pytorch', 'pytorch', 'slurm', 'mpi'))
    # Two ranks wait for one that is absent; more of these would take too long.
    rank, world_size = chance.choice([(0, 1)] * 14 + [(0, 2), (1, 2)])
    own = valid_variables(launcher, rank, world_size)
    environ = dict(own)
    if chance.random() < 0.5:
        other = chance.choice([name for name in ('pytorch', 'slurm', 'mpi') if name != launcher])
        stale = valid_variables(other, 3, 8)
        if other == 'pytorch':
            stale.update(AGENT, GROUP_RANK='3', ROLE_RANK='3', TORCHELASTIC_USE_AGENT_STORE='True')
        picked = chance.sample(sorted(stale), chance.randint(1, len(stale)))
        environ = {**{name: stale[name] for name in picked}, **own}
    if launcher == 'pytorch' and chance.random() < 0.4:
        environ.update(AGENT)
    names = sorted({*environ, *AGENT, 'LOCAL_WORLD_SIZE', 'RANK'})
    changed = chance.sample(names, chance.choice((0, 1, 1, 2, 3)))
    for name in changed:
        if chance.random() < 0.3:
            environ.pop(name, None)
        else:
            environ[name] = chance.choice(values_for(name))
    flags = ['--launcher', launcher]
    case = dict(number=number, launcher=launcher, environ=environ, flags=flags)
    return dict(case, timeout=SHORT_TIMEOUT if waits_for_nobody(case) else TIMEOUT)


def draw_found_case(number):
    """One of the environments of test_launcher_choice.py, damaged every other time."""
    from tests.cli.test_launcher_choice import below_torchrun, damage, draw

    drawn = draw(number)
    if drawn['scheduler'] is below_torchrun:  # which the parents of a process tell
        return draw_found_case(number + 1000)
    if number % 2:
        drawn, _ = damage(drawn, number)
    kept = {name: drawn[name] for name in ('environ', 'flags', 'expected')}
    return dict(kept, number=number, timeout=SHORT_TIMEOUT)


def waits_for_nobody(case):
    """Whether the variables may name a store or a rank that does not exist."""
    environ, launcher = case['environ'], case['launcher']
    own = valid_variables(launcher, 0, 1)
    by_agent = environ.get('TORCHELASTIC_USE_AGENT_STORE') == 'True'
    elsewhere = any(environ.get(name) != own.get(name) for name in ('MASTER_ADDR', 'MASTER_PORT'))
    return elsewhere or has_peers(case) or (launcher == 'pytorch' and by_agent)


def clean_environment():
    pattern = re.compile(
        r'(SLURM|OMPI|PMI|PET|VC|TORCHELASTIC|GROUP|ROLE)_|(LOCAL_)?(RANK|WORLD_SIZE)$|MASTER_'
    )
    return {name: value for name, value in os.environ.items() if not pattern.match(name)}


# through init_device -------------------------------------------------------------------------


def start(case):
    """In a process of its own: start and say what came of it."""
    try:
        context = init_device(case['launcher'], 'cpu', timeout=case['timeout'])
    except DevPlugError as error:
        return dict(kind='refused', type=type(error).__name__, message=str(error))
    except BaseException as error:
        return dict(kind='crashed', message=f'{type(error).__name__}: {error}')
    env = context.env
    return dict(kind='started', values=[env.rank, env.local_rank, env.world_size])


def run_script(case):
    """In a process of its own that has imported everything: ``python tools/train.py ...``."""
    # What would take its place waits for other hosts.
    launch._start_server = lambda: 'spawn'
    launch._run_ranks = lambda *args: STARTS
    sys.argv = [
        'tools/train.py', 'configs/digits/digits_cpu.py', *case['flags'],
        '--timeout', str(case['timeout']), '--work-dir', os.path.join(case['folder'], 'work'),
        '--cfg-options', 'train_cfg.max_epochs=1', 'train_cfg.val_interval=5',
    ]  # fmt: skip
    path = os.path.join(case['folder'], 'stderr')
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), 2)
    status = 0
    try:
        runpy.run_path('tools/train.py', run_name='__main__')
    except SystemExit as ended:
        status = ended.code
    except BaseException:
        traceback.print_exc()
        status = 'crashed'
    sys.stderr.flush()
    with open(path, errors='replace') as file:
        return dict(kind='script', status=status, told=file.read()[-20000:])


def in_fork(case, port):
    """Run :func:`start` or the script in a fork of this process, which has no threads."""
    environ = {name: value.replace('PORT', str(port)) for name, value in case['environ'].items()}
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, 1)
        os.dup2(devnull, 2)
        os.environ.update(environ)
        outcome = run_script(case) if 'folder' in case else start(case)
        os.write(writing, json.dumps(outcome).encode())
        os._exit(0)
    os.close(writing)
    deadline = time.monotonic() + HANGS_AFTER
    received = b''
    while select.select([reading], [], [], max(0, deadline - time.monotonic()))[0]:
        part = os.read(reading, 65536)
        received += part
        if not part:
            break
    else:
        os.kill(child, signal.SIGKILL)
    os.close(reading)
    _, status = os.waitpid(child, 0)
    if received:
        return json.loads(received)
    return dict(kind='died or hangs', message=f'status {status}')


def main(first, folder):
    """Run every so manieth case; one line of JSON for each."""
    for module in PRELOAD:
        __import__(module)
    torch.set_num_threads(1)
    for number in range(first, CASES + SCRIPT_CASES + FOUND_CASES, WORKERS):
        found = number >= CASES + SCRIPT_CASES
        case = draw_found_case(number) if found else draw_case(number)
        if number >= CASES:
            case['folder'] = os.path.join(folder, str(number))
            os.mkdir(case['folder'])
        print(json.dumps(dict(in_fork(case, free_port()), number=number)), flush=True)


@pytest.fixture(scope='module')
def everything(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp('fuzz'))
    code = (
        'import sys; from tests.cli.test_launch_fuzz import main; '
        'main(int(sys.argv[1]), sys.argv[2])'
    )
    env = dict(clean_environment(), PYTHONPATH=PATHS, OMP_NUM_THREADS='1')
    with ThreadPoolExecutor(WORKERS) as pool:
        done = pool.map(lambda first: python('-c', code, first, folder, env=env), range(WORKERS))
        printed = [worker.stdout for worker in done]
    found = [json.loads(line) for text in printed for line in text.splitlines()]
    return {outcome['number']: outcome for outcome in found}


@pytest.fixture
def outcomes(everything):
    """Each case through init_device, and what came of it."""
    return [(draw_case(number), found) for number, found in everything.items() if number < CASES]


def of_kind(outcomes, kind):
    return [(case, outcome) for case, outcome in outcomes if outcome['kind'] == kind]


def test_every_case_ends_in_a_start_or_a_refusal(outcomes):
    assert len(outcomes) == CASES >= 500
    strange = [each for each in outcomes if each[1]['kind'] not in ('started', 'refused')]
    assert strange == []
    assert len(of_kind(outcomes, 'started')) > 100
    assert len(of_kind(outcomes, 'refused')) > 100


def test_what_starts_has_the_values_it_was_given(outcomes):
    for case, outcome in of_kind(outcomes, 'started'):
        expected = [0, 0, 1]
        if case['launcher'] != 'none':
            rank, world_size, local_rank, _ = NAMES[case['launcher']]
            found = [case['environ'].get(name) for name in (rank, local_rank, world_size)]
            expected = [0 if value is None else int(value) for value in found]
        assert outcome['values'] == expected, case


def is_member(environ):
    """Whether variables are those of a pod of several."""
    try:
        refuse_to_run_alone(environ)
    except LaunchError:
        return True
    return False


def test_a_single_process_starts_among_any_leftovers(outcomes):
    for case, outcome in outcomes:
        if case['launcher'] == 'none':
            wanted = 'refused' if is_member(case['environ']) else 'started'
            assert outcome['kind'] == wanted, case


def test_valid_variables_of_one_rank_start_among_any_leftovers(outcomes):
    """Only what was drawn at random may be the reason of a refusal."""
    checked = 0
    for case, outcome in outcomes:
        own, environ = valid_variables(case['launcher'], 0, 1), case['environ']
        read = {*own, *AGENT, 'LOCAL_WORLD_SIZE'}
        if own and {name: environ[name] for name in read if name in environ} == own:
            assert outcome['kind'] == 'started', (case, outcome)
            checked += 1
    assert checked > 10


def test_refusals_name_a_variable_that_is_wrong(outcomes):
    for case, outcome in of_kind(outcomes, 'refused'):
        named = set(re.findall(r'[A-Z]+(?:_[A-Z]+)+|RANK', outcome['message']))
        assert named & wrong_variables(case), (case, outcome)
        assert len(outcome['message']) < 3000


def wrong_variables(case):
    """What differs from a job of one rank that the launcher would start."""
    own = valid_variables(case['launcher'], 0, 1)
    environ = case['environ']
    wrong = {name for name in {*own, *environ} if environ.get(name) != own.get(name)}
    # Two ranks that wait for each other are told where and for how many.
    return wrong | {'MASTER_ADDR', 'MASTER_PORT'} if has_peers(case) else wrong


def has_peers(case):
    """Whether the variables say that there is more than one rank, or nothing of it."""
    names = NAMES.get(case['launcher'])
    return names is not None and case['environ'].get(names[1]) != '1'


# through the script --------------------------------------------------------------------------


def test_the_script_trains_or_refuses_in_one_message(everything):
    numbers = [number for number in everything if CASES <= number < CASES + SCRIPT_CASES]
    found = [(draw_case(number), everything[number]) for number in numbers]
    assert len(found) == SCRIPT_CASES >= 30
    trained = 0
    for case, outcome in found:
        assert outcome['kind'] == 'script', (case, outcome)
        if outcome['status'] == 0:
            trained += 1
            continue
        assert outcome['status'] == 1, (case, outcome)
        told = outcome['told']
        assert 'Traceback' not in told, (case, told)
        (message,) = re.findall(r'^mmdevplug: \w+Error: .*', told, re.MULTILINE)
        named = set(re.findall(r'[A-Z]+(?:_[A-Z]+)+|RANK', message))
        assert named & wrong_variables(case), (case, told)
    assert 5 < trained < SCRIPT_CASES - 5


def test_the_script_finds_its_launcher(everything, monkeypatch):
    """In a process of its own it does what test_launcher_choice.py has decided."""
    from tests.cli.test_launcher_choice import decide

    monkeypatch.setattr(hosts, 'say', lambda text: None)
    kinds = []
    for number in range(CASES + SCRIPT_CASES, CASES + SCRIPT_CASES + FOUND_CASES):
        case, outcome = draw_found_case(number), everything[number]
        wanted = decide(case)
        kinds.append(wanted[0])
        told = outcome.get('told', '')
        assert outcome['kind'] == 'script', (case, outcome)
        assert 'Traceback' not in told, (case, told)
        if wanted[0] == 'starts':
            # 1: more than there is room for.
            assert outcome['status'] in (STARTS, 1), (case, outcome)
        elif wanted[0] == 'alone':
            assert outcome['status'] == 0, (case, outcome)
        else:
            # A rank of several finds no other within the timeout.
            assert outcome['status'] == 1, (case, outcome)
        if wanted[0] == 'refused':
            assert ' '.join(wanted[1].split()) in ' '.join(told.split()), (case, told)
    assert {'alone', 'refused', 'starts', 'rank'} <= set(kinds)
