"""Writing, finding and reading checkpoints: whole or not at all."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict, deque
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.logging import HistoryBuffer

from mmdevplug.accelerators import get_accelerator
from mmdevplug.checkpoint import reading, writing
from mmdevplug.checkpoint.host_copy import copy_to_host
from mmdevplug.checkpoint.job import Job, origin_of
from mmdevplug.checkpoint.reading import (
    check_file,
    find_good_checkpoint,
    read_checkpoint,
    read_pointer,
)
from mmdevplug.checkpoint.saving import BackgroundWriter
from mmdevplug.checkpoint.writing import (
    POINTER,
    UNFINISHED,
    remove_unfinished,
    write_checkpoint,
    write_text,
)
from mmdevplug.errors import CheckpointError
from mmdevplug.utils import atomic_files
from tests.checkpoint.test_malicious import Calls
from tests.commands import environment, run
from tests.jobs import load_file, needs_safe_loading


def save(path, number=0, age=0, meta=None):
    """A checkpoint, ``age`` seconds old."""
    meta = dict(iter=number) if meta is None else meta
    write_checkpoint(dict(meta=meta, state_dict=dict(w=torch.rand(400))), str(path))
    then = time.time() - age
    os.utime(path, (then, then))
    return str(path)


# writing ----------------------------------------------------------------------------------------


def test_what_was_there_stays_until_the_new_is_whole(tmp_path, monkeypatch):
    path = tmp_path / 'a.pth'
    save(path, 1)
    order = []
    replace, flush = os.replace, atomic_files._flush
    monkeypatch.setattr(
        atomic_files, '_flush', lambda file: (order.append(f'flush {file.name[:5]}'), flush(file))
    )
    monkeypatch.setattr(
        os, 'replace', lambda a, b: (order.append(f'rename {a[-20:-8]}'), replace(a, b))
    )
    save(path, 2)
    assert [step.split()[0] for step in order] == ['flush', 'rename', 'flush']
    assert order[0] == 'flush a.pth'
    assert read_checkpoint(str(path))['meta']['iter'] == 2
    assert os.listdir(tmp_path) == ['a.pth']


@pytest.mark.parametrize('fails', [False, True])
def test_the_disk_begins_while_the_rest_is_made(tmp_path, monkeypatch, fails):
    ranges = []

    def call(descriptor, start, length, advice):
        ranges.append((start, length))
        if fails:  # what it cannot do, the flush does
            raise OSError(95, 'Operation not supported')

    monkeypatch.setattr(os, 'posix_fadvise', call)
    monkeypatch.setattr(writing, '_STRETCH', 1 << 20)
    weights = torch.rand(1 << 20)
    path = tmp_path / 'a.pth'
    write_checkpoint(dict(state_dict=dict(w=weights[:500_000], v=weights[500_000:])), str(path))
    assert torch.equal(read_checkpoint(str(path))['state_dict']['v'], weights[500_000:])
    ends = [start + length for start, length in ranges]
    assert [start for start, _ in ranges] == [0, *ends[:-1]]
    assert all(length >= 1 << 20 for _, length in ranges)
    assert path.stat().st_size - ends[-1] < 1 << 20


@pytest.mark.parametrize('what', [KeyboardInterrupt, OSError('disk'), RuntimeError('unexpected')])
def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch, what):
    path = tmp_path / 'a.pth'
    save(path, 1)

    def fail(value, file, **_):
        file.write(b'half')
        raise what

    monkeypatch.setattr(torch, 'save', fail)
    with pytest.raises(KeyboardInterrupt if what is KeyboardInterrupt else CheckpointError):
        save(path, 2)
    monkeypatch.undo()
    assert read_checkpoint(str(path))['meta']['iter'] == 1
    assert os.listdir(tmp_path) == ['a.pth']


@pytest.fixture
def mount(tmp_path):
    """``mount(*words)``: mount something in the place of the test's folder, which needs root."""

    def call(*words):
        done = subprocess.run(['mount', *words, str(tmp_path)], capture_output=True)
        if done.returncode:
            pytest.skip(f'mounting needs root: {done.stderr.decode().strip()}')

    yield call
    subprocess.run(['umount', '-l', str(tmp_path)], capture_output=True)


def test_a_full_disk(tmp_path, mount):
    mount('-t', 'tmpfs', '-o', 'size=1m', 'tmpfs')
    path = tmp_path / 'a.pth'
    save(path, 1)
    with pytest.raises(CheckpointError) as raised:
        write_checkpoint(dict(w=torch.rand(1_000_000)), str(path))
    assert str(path) in str(raised.value)
    assert re.search(r'\d (bytes|KiB) are free there', str(raised.value))
    assert '--work-dir' in str(raised.value)
    assert os.listdir(tmp_path) == ['a.pth']
    assert read_checkpoint(str(path))['meta']['iter'] == 1


def test_a_read_only_folder(tmp_path, mount):
    path = tmp_path / 'a.pth'
    save(path, 1)
    mount('--bind', str(tmp_path))
    mount('-o', 'remount,ro,bind')
    with pytest.raises(CheckpointError, match=r'Read-only file system|cannot be opened'):
        save(path, 2)
    assert read_checkpoint(str(path))['meta']['iter'] == 1
    with pytest.raises(CheckpointError, match='cannot make the folder'):
        save(tmp_path / 'deeper' / 'a.pth', 2)


def test_a_killed_writer_leaves_the_old_file_and_one_to_remove(tmp_path):
    path = tmp_path / 'a.pth'
    save(path, 1)
    script = (
        'import torch, sys\n'
        'from mmdevplug.utils import atomic_files\n'
        'from mmdevplug.checkpoint import writing\n'
        'def flush(path): print("written", flush=True); sys.stdin.read()\n'
        'atomic_files._flush = flush\n'
        f'writing.write_checkpoint(dict(meta=dict(iter=2)), {str(path)!r})'
    )
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process = subprocess.Popen([sys.executable, '-c', script], env=environment(), **pipes)
    assert process.stdout.readline() == b'written\n'
    process.kill()
    process.wait()
    names = sorted(os.listdir(tmp_path))
    assert len(names) == 2
    assert UNFINISHED in names[1]
    assert read_checkpoint(str(path))['meta']['iter'] == 1
    assert remove_unfinished(tmp_path) == 1
    assert os.listdir(tmp_path) == ['a.pth']


# finding ----------------------------------------------------------------------------------------


def three(tmp_path):
    paths = [save(tmp_path / f'iter_{n}.pth', n, age=100 - n) for n in (1, 2, 3)]
    write_text(paths[-1], tmp_path / POINTER)
    return paths


@pytest.mark.parametrize('sixteenth', range(16))
def test_a_truncated_newest_file(tmp_path, sixteenth, monkeypatch):
    messages = []
    monkeypatch.setattr(reading, 'log_warning', messages.append)
    paths = three(tmp_path)
    os.truncate(paths[2], os.path.getsize(paths[2]) * sixteenth // 16)
    assert find_good_checkpoint(tmp_path) == paths[1]
    assert len(messages) == 1
    assert messages[0].startswith(f'Cannot resume: {paths[2]} ')


def test_a_flipped_bit_which_pytorch_would_not_notice(tmp_path):
    paths = three(tmp_path)
    tensor = read_checkpoint(paths[2])['state_dict']['w'].numpy().tobytes()
    with open(paths[2], 'r+b') as file:
        where = file.read().index(tensor) + 801
        file.seek(where)
        file.write(bytes([tensor[801] ^ 4]))
    assert load_file(paths[2], weights_only=True)
    for read in (check_file, read_checkpoint):  # by --resume, by test and load_from
        with pytest.raises(CheckpointError, match=r'iter_3.pth is damaged: .*'):
            read(paths[2])
    assert find_good_checkpoint(tmp_path) == paths[1]


def test_all_damaged(tmp_path):
    for path in three(tmp_path):
        os.truncate(path, 100)
    with pytest.raises(CheckpointError, match=r'none of the 3 .*iter_3.*iter_2.*iter_1'):
        find_good_checkpoint(tmp_path)


def test_the_pointer_decides_before_the_date_if_it_leads_somewhere(tmp_path):
    paths = three(tmp_path)
    assert read_pointer(tmp_path) == paths[2]
    for text in ('', 'elsewhere/iter_9.pth', '\x00\x01', paths[0]):
        (tmp_path / 'last_checkpoint').write_text(text)
        expected = paths[0] if text == paths[0] else paths[2]
        assert find_good_checkpoint(tmp_path) == expected, text
    (tmp_path / 'last_checkpoint').unlink()
    assert find_good_checkpoint(tmp_path) == paths[2]


def test_a_folder_that_was_moved(tmp_path):
    (tmp_path / 'a').mkdir()
    three(tmp_path / 'a')
    shutil.move(tmp_path / 'a', tmp_path / 'b')
    assert find_good_checkpoint(tmp_path / 'b') == str(tmp_path / 'b' / 'iter_3.pth')


def test_nothing_saved_yet(tmp_path):
    assert find_good_checkpoint(tmp_path) is None
    save(tmp_path / 'best_accuracy_epoch_3.pth')
    (tmp_path / 'notes.pth').write_text('')
    assert find_good_checkpoint(tmp_path) is None


def test_only_what_a_job_has_saved_whatever_times_of_files_say(tmp_path):
    paths = three(tmp_path)
    assert find_good_checkpoint(tmp_path, 'mine') is None
    mine = [
        of_job(tmp_path, 'mine', number, age) for number, age in ((4, 300), (5, 200), (6, 400))
    ]
    of_job(tmp_path, 'other', 7, 0)
    assert find_good_checkpoint(tmp_path, 'mine') == mine[2]
    os.truncate(mine[2], 1000)
    assert find_good_checkpoint(tmp_path, 'mine') == mine[1]
    assert find_good_checkpoint(tmp_path) == paths[2]
    # The pointer was not written after the last of them.
    write_text(mine[0], tmp_path / POINTER)
    assert find_good_checkpoint(tmp_path) == mine[1]


def of_job(folder, job, number, age):
    meta = dict(job=job, iter=number, cfg='x')
    return save(folder / f'iter_{number}.pth', number, age=age, meta=meta)


def test_whose_a_checkpoint_is_is_read_without_running_code(tmp_path):
    ran = tmp_path / 'ran'
    opens = Calls(open, str(ran), 'w')
    path = save(tmp_path / 'a.pth', 1, meta=dict(job='mine', iter=3, other=opens))
    assert origin_of(path) == ('mine', 3)
    assert not ran.exists()
    for index, meta in enumerate([dict(job=opens, iter=3), dict(iter='3'), [1], opens]):
        assert origin_of(save(tmp_path / f'{index}.pth', 1, meta=meta)) == (None, -1)
    (tmp_path / 'b.pth').write_text('')
    assert origin_of(tmp_path / 'b.pth') == (None, -1)
    assert not ran.exists()


# copying ----------------------------------------------------------------------------------------


class Noted:
    """Some object that a hook puts into the message hub."""


@needs_safe_loading
@pytest.mark.parametrize(
    ('value', 'name'),
    [
        (Path('data'), f'{type(Path()).__module__}.PosixPath'),
        (dict(a=[Noted()]), f'{__name__}.Noted'),
        (np.random.RandomState(1), 'numpy.random._pickle.__randomstate_ctor'),
        (dict(a=deque([1]), b=HistoryBuffer(), c=np.float64(2), d={1}, e=torch.float16), None),
    ],
    ids=['path', 'class', 'function', 'loadable'],
)
def test_what_could_not_be_loaded_again_is_named_when_it_is_saved(
    tmp_path, monkeypatch, value, name
):
    said = []
    monkeypatch.setattr(writing, 'log_warning', said.append)
    path = str(tmp_path / 'epoch_1.pth')
    write_checkpoint(dict(message_hub=dict(runtime_info=dict(source=value))), path)
    if name is None:
        read_checkpoint(path)
        assert said == []
        return
    text = next(line for line in said if repr(name) in line)
    assert f'checkpoint_classes=[{name!r}]' in text
    assert "['message_hub']['runtime_info']['source']" in text or name.startswith('numpy')
    with pytest.raises(CheckpointError, match='refused'):
        read_checkpoint(path)


def test_what_cannot_be_pickled_is_named(tmp_path):
    write_checkpoint(dict(counts=defaultdict(lambda: 0, a=1)), str(tmp_path / 'counts'))
    assert read_checkpoint(str(tmp_path / 'counts')) == dict(counts=dict(a=1))
    (tmp_path / 'counts').unlink()
    hub = dict(runtime_info=dict(iter=1, source=dict(a=[1, lambda: 2])))
    with pytest.raises(
        CheckpointError, match=r"\['runtime_info'\]\['source'\]\['a'\]\[1\]: .*lambda"
    ):
        write_checkpoint(dict(message_hub=hub), str(tmp_path / 'epoch_1.pth'))
    assert list(tmp_path.iterdir()) == []


def test_a_kept_copy_does_not_change_with_the_original():
    weight = torch.arange(6.0).reshape(2, 3)
    state = dict(a=weight, b=[weight, weight.t()], c=(1, dict(x=[2])), d=torch.tensor(3))
    copied = copy_to_host(state, get_accelerator('cpu'), keep=True)
    expected = weight.clone()
    weight += 1
    state['c'][1]['x'].append(3)
    assert torch.equal(copied['a'], expected)
    assert copied['b'][0] is copied['a']
    assert torch.equal(copied['b'][1], expected.t())
    assert copied['c'] == (1, dict(x=[2]))


def test_tensors_of_a_kept_copy_can_be_saved_one_by_one():
    kinds = [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64]
    state = {str(kind): torch.ones(3, 5, dtype=kind) for kind in kinds}
    state.update(empty=torch.zeros(0, 4), number=torch.tensor(2.0), flipped=torch.rand(4, 2).t())
    copied = copy_to_host(state, get_accelerator('cpu'), keep=True)
    for name, tensor in copied.items():
        assert torch.equal(tensor, state[name])
        # Whoever saves one of them does not save the others with it.
        assert len(tensor.storage()) == tensor.numel()


def test_host_tensors_are_not_copied_when_training_waits():
    weight = torch.rand(3)
    state = torch.nn.Linear(2, 2).state_dict()
    state['w'] = weight
    copied = copy_to_host(state, get_accelerator('cpu'))
    assert copied['w'].data_ptr() == weight.data_ptr()
    assert copied._metadata == state._metadata


# in the background ------------------------------------------------------------------------------


def test_errors_of_the_background_are_raised_once():
    background = BackgroundWriter()

    def fail():
        raise CheckpointError('the disk is full')

    background.start(fail)
    with pytest.raises(CheckpointError, match='full'):
        background.join()
    assert background.join()
    background.start(fail)
    with pytest.raises(CheckpointError, match='full'):
        background.start(lambda: None)


def test_the_interpreter_waits_for_the_background_before_exit_handlers():
    """The other ranks take a rank for dead whose watch has stopped."""
    script = (
        'import atexit, time\n'
        'from mmdevplug.checkpoint.saving import BackgroundWriter\n'
        'atexit.register(print, "exit handler", flush=True)\n'
        'BackgroundWriter().start(lambda: (time.sleep(0.5), print("written", flush=True)))\n'
        'raise SystemExit("training failed")'
    )
    done = run(sys.executable, '-c', script)
    assert done.returncode == 1
    assert done.stdout.splitlines()[:2] == ['written', 'exit handler']


def test_one_after_the_other():
    background, order = BackgroundWriter(), []
    background.start(lambda: (time.sleep(0.2), order.append(1)))
    background.start(lambda: order.append(2))
    assert order[0] == 1
    assert background.join()
    assert order == [1, 2]


def test_a_new_run_in_a_used_folder_says_what_is_there(tmp_path, monkeypatch):
    messages = []
    monkeypatch.setattr(reading, 'log_warning', messages.append)
    monkeypatch.delenv('TORCHELASTIC_RESTART_COUNT', raising=False)
    assert reading._find(str(tmp_path), None, False, Job('a', 0)) is None
    assert not messages
    (tmp_path / 'epoch_3.pth').write_bytes(b'')
    assert reading._find(str(tmp_path), None, False, None) is None
    assert not messages  # which does not train
    assert reading._find(str(tmp_path), None, False, Job('a', 0)) is None
    assert 'holds 1 checkpoint(s) of an earlier run, epoch_3.pth the newest' in messages[0]
