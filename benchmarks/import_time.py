"""What ``import mmdevplug`` adds to ``import mmengine``, in seconds; medians over fresh processes.

python benchmarks/import_time.py [--rounds 9] [--json FILE]
"""

import argparse
import statistics
import subprocess
import sys

from result_file import write_results

SCRIPT = (
    'import time; start = time.perf_counter(); import mmengine; middle = time.perf_counter(); '
    'import mmdevplug; print(middle - start, time.perf_counter() - middle)'
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--rounds', type=int, default=9)
    parser.add_argument('--json', help='write the figures to this file')
    args = parser.parse_args()
    rounds = [
        [
            float(number)
            for number in subprocess.check_output([sys.executable, '-c', SCRIPT]).split()
        ]
        for _ in range(args.rounds)
    ]
    mmengine, ours = (statistics.median(times) for times in zip(*rounds))
    if args.json:
        write_results(args.json, [dict(mmengine_s=mmengine, mmdevplug_s=ours)])
    print(f'import mmengine {mmengine:.3f} s, import mmdevplug {ours:.3f} s more')


if __name__ == '__main__':
    main()
