"""A metric for predictions whose library measures them on CUDA alone."""

from mmengine.evaluator import BaseMetric
from mmengine.registry import METRICS


@METRICS.register_module()
class BoxScores(BaseMetric):
    """Count the boxes of all samples, and add up their scores."""

    def process(self, data_batch, data_samples):
        """Note the scores of a batch."""
        self.results += [
            sample['pred_instances_3d']['scores_3d'].tolist() for sample in data_samples
        ]

    def compute_metrics(self, results):
        """Sum up over all samples."""
        return dict(
            samples=len(results), boxes=sum(map(len, results)), scores=sum(map(sum, results))
        )
