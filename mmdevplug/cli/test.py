"""Test: ``tools/test.py``."""

import argparse
import sys
from typing import Iterator, List, Optional

from mmengine.config import Config, ConfigDict
from mmengine.registry import RUNNERS

from mmdevplug.errors import DevPlugError

from .arguments import Parser
from .common import add_common_arguments, check_checkpoint, load_complete_config, run
from .hosts import add_launch_arguments, starts_processes


def build_parser() -> argparse.ArgumentParser:
    """The arguments of OpenMMLab's ``tools/test.py``, and those of ``mmdevplug train``."""
    parser = Parser(prog='mmdevplug test', description='Test a model')
    add_common_arguments(parser)
    parser.add_argument('checkpoint', help='path or address of the checkpoint')
    parser.add_argument('--tta', action='store_true', help='average over augmented inputs')
    parser.add_argument('--out', help='a .pkl file for the predictions')
    add_launch_arguments(parser)
    return parser


def main(argv: Optional[List[str]] = None) -> None:
    """Test a model."""
    argv = list(sys.argv[1:] if argv is None else argv)
    args = build_parser().parse_args(argv)
    if starts_processes(args):
        from .launch import launch  # which a rank does without

        launch('mmdevplug.cli.test', argv, args)
        return
    keys = ('model', 'test_dataloader', 'test_cfg', 'test_evaluator')
    cfg = load_complete_config(args, keys)
    check_checkpoint(args.checkpoint, 'CHECKPOINT')
    cfg.load_from = args.checkpoint
    cfg.resume = False
    if args.tta:
        _use_tta(cfg)
    if args.out:
        _dump_predictions(cfg, args.out)
    RUNNERS.build(cfg).test()


def _use_tta(cfg: Config) -> None:
    missing = [key for key in ('tta_model', 'tta_pipeline') if key not in cfg]
    if missing:
        raise DevPlugError(
            f'--tta needs {" and ".join(missing)} in the config, which has none. Add them, as '
            f"MMEngine's test-time augmentation has it, or test without --tta."
        )
    for dataset in _innermost(cfg.test_dataloader.dataset):
        if 'batch_shapes_cfg' in dataset:
            dataset.batch_shapes_cfg = None  # mmdet and mmyolo: views have different sizes
        dataset.pipeline = cfg.tta_pipeline
    cfg.model = dict(cfg.tta_model, module=cfg.model)


def _innermost(dataset: ConfigDict) -> Iterator[ConfigDict]:
    """The configs of the data sets that load samples, inside of others that wrap or join them."""
    inside = dataset.get('datasets', dataset.get('dataset'))
    if inside is None:
        yield dataset
        return
    for each in inside if isinstance(inside, (list, tuple)) else [inside]:
        yield from _innermost(each)


def _dump_predictions(cfg: Config, path: str) -> None:
    if not path.endswith(('.pkl', '.pickle')):
        raise DevPlugError(f'--out {path!r}: expected a file name that ends in .pkl or .pickle.')
    evaluators = cfg.test_evaluator
    evaluators = list(evaluators) if isinstance(evaluators, (list, tuple)) else [evaluators]
    # First: a metric may take long, or fail.
    cfg.test_evaluator = [dict(type='DumpResults', out_file_path=path), *evaluators]


if __name__ == '__main__':
    sys.exit(run(main))
