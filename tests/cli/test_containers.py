"""What is different in a container: process 1, the user, read-only files, little shared memory."""

import signal

import pytest

from tests.cli.running import DIGITS
from tests.cli.starting import (
    USER,
    Container,
    check_saved,
    in_box,
    in_container,
    need_namespaces,
    write_config,
)
from tests.commands import CLI, environment, run


@pytest.mark.parametrize('ranks', [1, 2])
def test_saves_in_time(tmp_path, ranks):
    """A job without rights saves within the grace period.

    The name is short: sockets lie in a folder of this name, and paths of theirs end at 108 bytes.
    """
    need_namespaces()
    work_dir = tmp_path / 'work'
    command = [*CLI, 'train', write_config(tmp_path, workers=2), '--work-dir', work_dir]
    command += ['--nproc', '2'] * (ranks > 1)
    job = Container(tmp_path, in_box(tmp_path, command))
    try:
        job.wait_for_iteration(3, ranks)
        assert job.end() == 128 + signal.SIGTERM, job.printed
    finally:
        job.process.kill()  # which ends all of the container
    check_saved(job, work_dir, ranks)
    assert (work_dir / 'last_checkpoint').stat().st_uid == USER


def run_in_box(folder, *command):
    return run(*in_container(in_box(folder, command)), env=environment(folder))


def test_doctor_in_a_container_without_rights(tmp_path):
    need_namespaces()
    done = run_in_box(tmp_path, *CLI, 'doctor', '--accelerator', 'cpu')
    assert 'Traceback' not in done.stderr
    assert 'cpu computes as the CPU does' in done.stdout


def test_no_place_for_semaphores(tmp_path):
    need_namespaces()
    only = 'mount -t tmpfs -o ro,size=1m tmpfs /dev/shm; exec "$0" "$@"'
    words = [*CLI, 'train', DIGITS, '--nproc', '2', '--work-dir', tmp_path / 'work']
    done = run('unshare', '--mount', 'bash', '-c', only, *words)
    assert done.returncode == 1
    assert 'mmdevplug: LaunchError: /dev/shm: Read-only file system.' in done.stderr
    assert 'Traceback' not in done.stderr


def test_no_folder_for_temporary_files(tmp_path):
    need_namespaces()
    done = run_in_box(tmp_path, 'env', 'TMPDIR=/no/such', *CLI, 'doctor')
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("mmdevplug: TMPDIR='/no/such': No usable temporary directory")
