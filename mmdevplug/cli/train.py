"""Train: ``tools/train.py``, and what every process of ``mmdevplug train`` runs."""

import argparse
import os
import sys
from typing import Callable, Iterator, List, Optional

from mmengine.config import Config
from mmengine.registry import RUNNERS

from mmdevplug.checks.findings import Finding, Section
from mmdevplug.checks.isolated import TaskOptions, run_isolated
from mmdevplug.environments.torchrun import AGENT
from mmdevplug.errors import DevPlugError, LaunchError, ModelError
from mmdevplug.utils.annotations import AnyRunner

from . import say as print_line
from .arguments import Parser
from .common import add_common_arguments, check_checkpoint, load_complete_config, run
from .hosts import add_launch_arguments, starts_processes

section = Section('numbers')
#: How long the comparison with the CPU may take.
STEP_SECONDS = 600.0


def build_parser() -> argparse.ArgumentParser:
    """The arguments of OpenMMLab's ``tools/train.py``, and two more."""
    parser = Parser(prog='mmdevplug train', description='Train a model')
    add_common_arguments(parser)
    parser.add_argument(
        '--resume',
        nargs='?',
        const='auto',
        help='resume from a checkpoint; from the newest in the work dir if no path is given',
    )
    parser.add_argument(
        '--resume-settings',
        choices=['checkpoint', 'config'],
        help='whose settings of optimizers and schedulers are taken where they differ on resuming',
    )
    parser.add_argument(
        '--sharded',
        action='store_true',
        help='shard the model over the ranks, which hold a part of its weights each',
    )
    parser.add_argument(
        '--spmd',
        action='store_true',
        help='drive all chips of torch_xla from one process, which divides each batch among them',
    )
    parser.add_argument('--amp', action='store_true', help='train with mixed precision')
    parser.add_argument(
        '--auto-scale-lr', action='store_true', help='scale the learning rate with the batch'
    )
    parser.add_argument(
        '--compare-with-cpu',
        action='store_true',
        help='compare one training step with the same step on the CPU before training',
    )
    add_launch_arguments(parser)
    return parser


def main(argv: Optional[List[str]] = None) -> None:
    """Train a model."""
    argv = list(sys.argv[1:] if argv is None else argv)
    args = build_parser().parse_args(argv)
    if args.compare_with_cpu and AGENT not in os.environ and os.getenv('RANK', '0') == '0':
        _compare_first(argv)
    if starts_processes(args):
        if args.spmd:
            raise LaunchError(
                '--spmd drives all chips of a host from one process, but several were asked for. '
                'Leave --nproc and --nnodes out.'
            )
        from .launch import launch  # which a rank does without

        launch('mmdevplug.cli.train', argv, args)
        return
    runner = RUNNERS.build(configure(args))
    runner.train()
    _say_where(runner, args.config)


def configure(args: argparse.Namespace) -> Config:
    """The config that the arguments of this command ask for."""
    keys = ('model', 'train_dataloader', 'train_cfg', 'optim_wrapper')
    cfg = load_complete_config(args, keys)
    if args.amp:
        from mmdevplug.optim.adapt_config import use_amp

        use_amp(cfg)
    if args.spmd:
        cfg.accelerator.spmd = True
    if args.sharded:
        cfg.sharding = cfg.get('sharding') or True
    if args.auto_scale_lr:
        _scale_lr(cfg)
    if args.resume is not None:
        if args.resume != 'auto':
            check_checkpoint(args.resume, '--resume')
        cfg.resume = args.resume
    if args.resume_settings is not None:
        cfg.accelerator.resume_settings = args.resume_settings
    return cfg


def _say_where(runner: AnyRunner, config: str) -> None:
    """Say where the last checkpoint of a training is, and what it can be tested with."""
    from mmengine.dist import is_main_process  # imports PyTorch
    from mmengine.runner import Runner

    from mmdevplug.checkpoint.reading import read_pointer

    if not (isinstance(runner, Runner) and is_main_process()):
        return  # one of the user's may have no folder
    path = read_pointer(runner.work_dir)
    if path is not None:
        then = f' Test it: mmdevplug test {config} {path}' if runner.cfg.get('test_cfg') else ''
        runner.logger.info(f'The last checkpoint is {path}.{then}')


def _scale_lr(cfg: Config) -> None:
    found = cfg.get('auto_scale_lr')
    if not found or 'base_batch_size' not in found:
        raise DevPlugError(
            f'--auto-scale-lr needs auto_scale_lr=dict(base_batch_size=...) in the config, but '
            f'found auto_scale_lr={found!r}. Add the batch size that the learning rate is for.'
        )
    cfg.auto_scale_lr.enable = True


def _compare_first(argv: List[str]) -> None:
    """Compare a step in a process of its own, which leaves the devices to those that train.

    Args:
        argv (list[str]): Arguments of ``mmdevplug train``.

    Raises:
        ModelError: If the device computes otherwise.
    """
    for finding in run_isolated(
        'mmdevplug.cli.train', ['the comparison'], dict(argv=argv), STEP_SECONDS
    ):
        if finding.level == 'error':
            remedy = f' {finding.remedy} (--compare-with-cpu).' if finding.remedy else ''
            raise ModelError(f'{finding.found}: {finding.why}{remedy}')
        print_line(f'{finding.found}.')


def work(task: str, options: TaskOptions, say: Callable[[str], None]) -> Iterator[Finding]:
    """Compare; see :mod:`mmdevplug.checks.isolated`."""
    from mmdevplug.checks.one_step import compare_with_cpu  # ranks do without

    args = build_parser().parse_args(options['argv'])
    args.launcher = 'none'
    say('loading the config')
    cfg = configure(args)
    say('one training step')
    found = compare_with_cpu(cfg)
    yield from found or [section.note(f'{task}: this job trains on the CPU')]


if __name__ == '__main__':
    sys.exit(run(main))
