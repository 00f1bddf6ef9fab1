"""One rank of a training that the suite compares with the CPU."""

import argparse
import json
import os
import sys
import tempfile
from typing import List, Optional

from mmdevplug.accelerators import device_context
from mmdevplug.checks.collectives_rank import Progress, reporting
from mmdevplug.distributed.byte_exchange import gather_json
from mmdevplug.utils.atomic_files import write_text

from .card import Card
from .training import RANKS, train


def main(argv: Optional[List[str]] = None) -> None:
    """Train as one rank; rank 0 writes the losses, averaged over the ranks, and the weights."""
    parser = argparse.ArgumentParser()
    for name in ('progress', 'json', 'timeout', 'options'):
        parser.add_argument(f'--{name}')
    args = parser.parse_args(argv)
    options = json.loads(args.options)
    progress = Progress(int(os.environ['RANK']), args.progress)
    with reporting(progress), tempfile.TemporaryDirectory() as folder:
        card = Card(options['asked'], progress.enter)
        found = train(card, options['accelerator'], folder, RANKS, **options['changes'])
        context = device_context()
        progress.enter('comparing losses')
        losses = gather_json(found['losses'].tolist())
        devices = gather_json(str(context.device))
        progress.enter('done')
    if context.env.rank == 0:
        results = dict(
            losses=[sum(of_ranks) / len(of_ranks) for of_ranks in zip(*losses)],
            weights={name: value.tolist() for name, value in found['weights'].items()},
            devices=devices,
            backend=context.backend,
        )
        write_text(json.dumps(results), args.json)


if __name__ == '__main__':
    sys.exit(main())
