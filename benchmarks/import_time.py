"""What ``import mmdevplug`` adds to ``import mmengine``, in seconds; medians over fresh processes.

python benchmarks/import_time.py
"""

import statistics
import subprocess
import sys

SCRIPT = (
    'import time; start = time.perf_counter(); import mmengine; middle = time.perf_counter(); '
    'import mmdevplug; print(middle - start, time.perf_counter() - middle)'
)
ROUNDS = 9


def main() -> None:
    rounds = [
        [
            float(number)
            for number in subprocess.check_output([sys.executable, '-c', SCRIPT]).split()
        ]
        for _ in range(ROUNDS)
    ]
    mmengine, ours = (statistics.median(times) for times in zip(*rounds))
    print(f'import mmengine {mmengine:.3f} s, import mmdevplug {ours:.3f} s more')


if __name__ == '__main__':
    main()
