"""A small model, its data and its configs for the checks of MMEngine's device assumptions."""

import numpy as np
import torch
from mmengine.config import Config
from mmengine.dataset import BaseDataset
from mmengine.evaluator import BaseMetric
from mmengine.infer import BaseInferencer
from mmengine.model import BaseDataPreprocessor, BaseModel, BaseTTAModel
from mmengine.registry import DATASETS, METRICS, MODELS, TRANSFORMS
from torch import nn
from torch.nn.functional import cross_entropy

SAMPLES, BATCH, FEATURES = 12, 2, 6


@MODELS.register_module()
class SiteNet(BaseModel):
    """Synchronized batch normalization, as in mmseg's configs, and several losses to log."""

    def __init__(self, data_preprocessor=None):
        super().__init__(data_preprocessor)
        self.stem = nn.Sequential(nn.Linear(FEATURES, 4), nn.SyncBatchNorm(4), nn.ReLU())
        self.head = nn.Linear(4, 3)

    def init_weights(self):
        super().init_weights()
        nn.init.normal_(self.head.weight, std=0.1)

    def forward(self, inputs, labels=None, mode='tensor'):
        scores = self.head(self.stem(inputs))
        if mode == 'loss':
            return dict(
                loss_class=cross_entropy(scores, labels),
                loss_small=0.01 * scores.square().mean(),
                loss_tiny=0.001 * scores.abs().mean(),
            )
        if mode == 'predict':
            return [dict(scores=one) for one in scores]
        return scores


@MODELS.register_module()
class SiteParts(BaseModel):
    """What MMSeparateDistributedDataParallel is for: children that are wrapped one by one."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)

    def forward(self, inputs, mode='tensor'):
        return self.second(self.first(inputs))


class Nested(BaseModel):
    """A data preprocessor inside a child, such as a teacher's."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.child = nn.Module()
        self.child.preprocessor = BaseDataPreprocessor()

    def forward(self, inputs, mode='tensor'):
        return self.layer(inputs)


@MODELS.register_module()
class MeanOfViews(BaseTTAModel):
    """Averages the scores of two views."""

    def merge_preds(self, data_samples_list):
        return [
            dict(scores=sum(view['scores'] for view in views) / len(views))
            for views in data_samples_list
        ]


@DATASETS.register_module()
class SiteDataset(BaseDataset):
    """A few random vectors."""

    def load_data_list(self):
        numbers = np.random.default_rng(5)
        inputs = numbers.normal(size=(SAMPLES, FEATURES)).astype(np.float32)
        return [dict(inputs=one, labels=index % 3) for index, one in enumerate(inputs)]

    def full_init(self):
        super().full_init()
        if not self.pipeline.transforms:
            self.pipeline.transforms.append(TRANSFORMS.build(dict(type='Packed')))


@TRANSFORMS.register_module()
class Packed:
    """A sample as tensors."""

    def __call__(self, data):
        return dict(inputs=torch.tensor(data['inputs']), labels=torch.tensor(data['labels']))


@TRANSFORMS.register_module()
class TwoViews:
    """A sample and its mirror image."""

    def __call__(self, data):
        inputs = torch.tensor(data['inputs'])
        label = torch.tensor(data['labels'])
        return dict(inputs=[inputs, inputs.flip(0)], labels=[label, label])


@METRICS.register_module()
class ScoresSeen(BaseMetric):
    """Reads each sample's prediction, as most metrics do, and keeps what all ranks read."""

    seen = None

    def process(self, data_batch, data_samples):
        for sample in data_samples:
            self.results.append(sample['scores'].cpu().numpy())

    def compute_metrics(self, results):
        type(self).seen = np.stack(results)
        return dict(samples=len(results))


class SiteInferencer(BaseInferencer):
    """The least that an inferencer of a model repository defines."""

    def _init_pipeline(self, cfg):
        return lambda inputs: dict(inputs=inputs)

    def visualize(self, inputs, preds, show=False, **kwargs):
        return []

    def postprocess(self, preds, visualization, return_datasample=False, **kwargs):
        return dict(predictions=[one['scores'].cpu().numpy() for one in preds])


def loader(shuffle=False):
    return dict(
        batch_size=BATCH,
        num_workers=0,
        sampler=dict(type='DefaultSampler', shuffle=shuffle),
        collate_fn=dict(type='default_collate'),
        dataset=dict(type='SiteDataset'),
    )


def optim_wrapper(kind='OptimWrapper', **options):
    return dict(type=kind, optimizer=dict(type='SGD', lr=0.1, momentum=0.9), **options)


def config(work_dir, name, **options):
    """A config of a job, which names no device."""
    cfg = Config(
        dict(
            default_scope='mmengine',
            model=dict(type='SiteNet'),
            train_dataloader=loader(),
            train_cfg=dict(by_epoch=True, max_epochs=2, val_interval=1),
            optim_wrapper=optim_wrapper(),
            val_dataloader=loader(),
            val_cfg=dict(),
            val_evaluator=dict(type='ScoresSeen'),
            env_cfg=dict(dist_cfg=dict(backend='gloo')),
            randomness=dict(seed=3),
            work_dir=str(work_dir),
            experiment_name=name,
        )
    )
    cfg.merge_from_dict(options)
    return cfg
