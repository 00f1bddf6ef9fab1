"""A metric may take rank 0 longer than the timeout of collectives."""

import time

from mmengine.config import Config
from mmengine.registry import METRICS, RUNNERS

from mmdevplug.cli.test import _dump_predictions
from mmdevplug.examples.digits import DigitsAccuracy
from tests.jobs import digits_config
from tests.ranks import run_ranks

TIMEOUT = 6


@METRICS.register_module()
class Slow(DigitsAccuracy):
    def compute_metrics(self, results):
        time.sleep(2 * TIMEOUT)
        return super().compute_metrics(results)


def evaluate(work_dir, out):
    cfg = digits_config(
        'cpu', work_dir, env_cfg__dist_cfg__timeout=TIMEOUT, test_evaluator__type='Slow'
    )
    _dump_predictions(cfg, out)
    return RUNNERS.build(cfg).test()


def test_the_others_wait_for_it(tmp_path):
    out = tmp_path / 'out.pkl'
    (first, second) = run_ranks(evaluate, 2, tmp_path, str(out))
    assert first == second
    assert first['accuracy'] > 0
    assert out.stat().st_size


def test_predictions_are_written_first():
    cfg = Config(dict(test_evaluator=dict(type='Slow')))
    _dump_predictions(cfg, 'out.pkl')
    assert [each['type'] for each in cfg.test_evaluator] == ['DumpResults', 'Slow']
