"""Handwritten digits: 1,797 real images of 8 by 8 pixels, which come with scikit-learn."""

from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple, Union

import numpy as np
from mmengine.dataset import BaseDataset
from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, METRICS, MODELS
from torch import Tensor, nn


@lru_cache(maxsize=None)
def _read_digits() -> Tuple[np.ndarray, np.ndarray]:
    """Images of 64 numbers between 0 and 16, and their digits.

    They are read from scikit-learn's file: importing it takes as long as training an epoch.
    """
    found = find_spec('sklearn')
    if found is not None and found.origin is not None:
        table = Path(found.origin).parent / 'datasets' / 'data' / 'digits.csv.gz'
        if table.exists():
            numbers = np.loadtxt(str(table), delimiter=',')
            return numbers[:, :-1], numbers[:, -1].astype(int)
    from sklearn.datasets import load_digits

    return load_digits(return_X_y=True)


@DATASETS.register_module()
class DigitsDataset(BaseDataset):
    """scikit-learn's digits, every fifth of them set aside for testing.

    An item is ``dict(inputs=image, labels=digit)``: a float32 array of shape (1, 8, 8), normalized
    to mean 0 and standard deviation 1 over the training images, and an integer.

    Args:
        split (str): ``'train'`` (1,437 images) or ``'test'`` (360 images).
        **kwargs: See :class:`mmengine.dataset.BaseDataset`.
    """

    METAINFO = dict(classes=tuple('0123456789'))
    MEAN, STD = 0.305, 0.376  # of pixels between 0 and 1

    def __init__(self, split: str = 'train', **kwargs: object) -> None:
        if split not in ('train', 'test'):
            raise ValueError(f"split={split!r}: expected 'train' or 'test'.")
        self.split = split
        super().__init__(**kwargs)

    def load_data_list(self) -> List[Dict[str, object]]:
        images, labels = _read_digits()
        images = (images / 16.0 - self.MEAN) / self.STD
        images = images.astype(np.float32).reshape(-1, 1, 8, 8)
        for_test = np.arange(len(labels)) % 5 == 0
        chosen = for_test if self.split == 'test' else ~for_test
        return [
            dict(inputs=image, labels=int(label))
            for image, label in zip(images[chosen], labels[chosen])
        ]

    def prepare_data(self, idx: int) -> Dict[str, object]:
        data = self.get_data_info(idx)
        return dict(inputs=data['inputs'], labels=data['labels'])


@MODELS.register_module()
class DigitsClassifier(BaseModel):
    """Two convolutions and a linear layer.

    Args:
        channels (int): Channels after the first convolution. Defaults to 32.
        norm (bool): Whether batch normalization follows the first. Defaults to True.
        **kwargs: See :class:`mmengine.model.BaseModel`.
    """

    def __init__(self, channels: int = 32, norm: bool = True, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.backbone = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1, bias=not norm),
            *([nn.BatchNorm2d(channels)] if norm else []),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Linear(2 * channels * 16, 10)

    def forward(
        self, inputs: Tensor, labels: Optional[Tensor] = None, mode: str = 'tensor'
    ) -> Union[Tensor, Dict[str, Tensor], List[Dict[str, Tensor]]]:
        """Classify images of shape (N, 1, 8, 8), with the right digits of shape (N,) as labels.

        Returns:
            For ``mode='loss'`` the losses; for ``'predict'`` a dict for each image; for
            ``'tensor'`` scores of shape (N, 10).
        """
        scores = self.head(self.backbone(inputs))
        if labels is not None and mode == 'loss':
            return dict(loss=nn.functional.cross_entropy(scores, labels))
        if labels is not None and mode == 'predict':
            digits = scores.argmax(dim=1).unbind()
            return [dict(pred=d, label=label) for d, label in zip(digits, labels.unbind())]
        return scores


@METRICS.register_module()
class DigitsAccuracy(BaseMetric):
    """The share of images that are classified correctly, in percent."""

    def process(self, data_batch: object, data_samples: Sequence[Dict[str, Tensor]]) -> None:
        self.results.extend(bool(one['pred'].cpu() == one['label'].cpu()) for one in data_samples)

    def compute_metrics(self, results: List[bool]) -> Dict[str, float]:
        return dict(accuracy=100.0 * sum(results) / len(results))
