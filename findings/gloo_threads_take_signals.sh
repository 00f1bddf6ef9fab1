#!/usr/bin/env bash
# torch 2.13.0, backend gloo: the threads that gloo starts block no signal, and wake every 10 ms. The kernel gives a signal
# that is sent to a process to any thread that does not block it. Python calls handlers in the main thread alone, and is
# not woken for a signal that another thread has taken: a rank whose main thread sleeps (a hook, a file system, a data
# source) hears of SIGTERM when that sleep is over. With four jobs on two cores a quarter of the second Ctrl-C were lost so.
# Here the signal is sent to the thread itself, so that the outcome does not depend on the kernel's choice.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy
cat >"$folder/show.py" <<'P'
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from torch import distributed

place = Path(sys.argv[1])
distributed.init_process_group('gloo', init_method=f'file://{place / "store"}', rank=0, world_size=1)
tasks = [task for task in Path('/proc/self/task').iterdir() if 'gloo' in (task / 'comm').read_text()]
assert tasks, 'no thread of gloo'
task = tasks[0]
blocked = int(re.search(r'SigBlk:\s+(\w+)', (task / 'status').read_text()).group(1), 16)
print(f'{(task / "comm").read_text().strip()}: signals blocked: {blocked:#x}')
heard = []
signal.signal(signal.SIGTERM, lambda *_: heard.append(time.monotonic()))
# tgkill(2), called by another process, while the main thread of this one sleeps.
call = f'import ctypes, time; time.sleep(1); ctypes.CDLL(None).syscall(234, {os.getpid()}, {task.name}, 15)'
began = time.monotonic()
sender = subprocess.Popen([sys.executable, '-c', call])
time.sleep(4)
slept = time.monotonic() - began
sender.wait()
print(f'sent after 1 s and more; slept {slept:.0f} s; heard of it after {heard[0] - began:.0f} s')
sys.exit(not (blocked == 0 and slept > 3.9 and heard[0] - began > 3.9))
P
"$folder/env/bin/python" "$folder/show.py" "$folder"
