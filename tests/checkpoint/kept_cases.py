"""Trainings with state in plain attributes, and with loaders besides that of the loop."""

import copy
import random
from collections import deque

import numpy as np
import torch
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.model import BaseDataPreprocessor
from mmengine.registry import DATA_SAMPLERS, HOOKS, LOOPS, MODELS
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop
from mmengine.runner.loops import _InfiniteDataloaderIterator
from torch import nn
from torch.utils.data import Sampler

from mmdevplug.utils.model import unwrap_model
from tests.checkpoint.training import NoisyModel, loader


class Clock:
    """An object of a plain class, as mmpretrain's batch augmentations are."""

    def __init__(self):
        self.ticks = 0

    def tick(self):
        self.ticks += 1
        return 1 + self.ticks / 50


class Temperature(nn.Module):
    """A part of a model, as a loss with a schedule of its own."""

    def __init__(self):
        super().__init__()
        self.value = 1.0
        self.register_buffer('mean', torch.zeros(2), persistent=False)

    def forward(self, losses):
        self.value *= 0.98
        self.mean.mul_(0.9).add_(losses.detach().mean(), alpha=0.1)
        return losses * self.value + 0.1 * self.mean


class Equalized(nn.Module):
    """Computes its weight in each forward pass, as mmagic's layers of StyleGAN do."""

    def __init__(self):
        super().__init__()
        self.weight_orig = nn.Parameter(torch.ones(2))
        self.weight = self.weight_orig.data

    def forward(self, losses):
        self.weight = self.weight_orig * 0.5
        return losses * self.weight


class ComparesByValue(nn.Linear):
    """A module without a hash, as mmrazor's channels are."""

    def __eq__(self, other):
        return isinstance(other, nn.Linear)


@MODELS.register_module(force=True)
class Resizes(BaseDataPreprocessor):
    """Chooses a size every third iteration, as mmdet's BatchSyncRandomResize does."""

    def __init__(self):
        super().__init__()
        self._input_size = None
        self._count = 0

    def forward(self, data, training=False):
        data = super().forward(data, training)
        if training:
            if self._input_size is None or self._count % 3 == 0:
                self._input_size = (random.random(), 1)
            self._count += 1
            data['inputs'] = data['inputs'] * (1 + self._input_size[0])
        return data


@MODELS.register_module(force=True)
class Keeps(NoisyModel):
    """A model whose losses depend on plain attributes of many types, other ones on each rank."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.temperature = Temperature()
        self.clocks = [Clock(), dict(inner=Clock())]
        # Names of layers begin alike.
        self.of_layers = {f'backbone.layers.of_stage.{n}': Clock() for n in range(2)}
        self.equalized = Equalized()
        self.average = None
        self.recent = deque(maxlen=3)
        self.table = dict(most=0.0, order=[], kinds={'first'})
        self.array = np.zeros(2)

    def forward(self, inputs, targets=None, mode='tensor'):
        if mode != 'loss':
            return super().forward(inputs, targets, mode)
        outputs = self.net(inputs)
        losses = self.equalized(((outputs - targets) ** 2).mean(0))
        with torch.no_grad():
            self.equalized(losses)
        self.average = losses.detach() if self.average is None else self.average * 0.9
        self.recent.append(float(losses.sum().detach()))
        self.table['most'] = max(self.table['most'], self.recent[-1])
        self.table['order'] = [*self.table['order'], get_rank()][-5:]
        self.array += self.recent[-1]
        self.steps = getattr(self, 'steps', get_rank()) + 1
        scale = self.clocks[0].tick() * self.clocks[1]['inner'].tick()
        for layer, clock in enumerate(self.of_layers.values()):
            scale *= [clock.tick() for _ in range(layer + 1)][-1]
        more = sum(self.recent) + self.table['most'] + self.average.sum() + self.array.sum() / 99
        loss = self.temperature(losses).mean() * scale * (1 + self.steps / 50)
        return dict(loss=loss + loss * more / 100)


@MODELS.register_module(force=True)
class BeginsFrozen(Keeps):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.net[0].requires_grad_(False)


@HOOKS.register_module(force=True)
class Unfreezes(Hook):
    """The usual recipe for fine-tuning: it acts once, and not again in a resumed run."""

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter == 3:
            unwrap_model(runner.model).net[0].requires_grad_(True)


@HOOKS.register_module(force=True)
class Cools(Hook):
    """Multiplies inputs by what it has counted in plain attributes; has no state_dict."""

    def __init__(self):
        self.count, self.best, self.clock = 0, None, Clock()

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.count += 1
        data_batch['inputs'].mul_(self.clock.tick() + self.count / 50 + (self.best or 0.0))

    def after_val_epoch(self, runner, metrics=None):
        self.best = min(self.best or 9.0, float(metrics['loss_error']))


class Curriculum:
    """An object of a user's with a state, which decides how large the loss is."""

    def __init__(self):
        self.stage = 0

    def state_dict(self):
        return dict(stage=self.stage, rank=get_rank())

    def load_state_dict(self, state):
        assert state['rank'] == get_rank()
        self.stage = state['stage']


@HOOKS.register_module(force=True)
class Teaches(Hook):
    """Adds its participant with one line."""

    def before_run(self, runner):
        self.curriculum = Curriculum()
        runner.add_participant('curriculum', self.curriculum)

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.curriculum.stage += 1 + get_rank()
        data_batch['inputs'].mul_(1 + self.curriculum.stage / 50)


@HOOKS.register_module(force=True)
class Teacher(Hook):
    """Keeps a moving average of the model, as loops and hooks for domain adaptation do."""

    def __init__(self, momentum):
        self.momentum = momentum

    def before_train(self, runner):
        self.teacher = copy.deepcopy(unwrap_model(runner.model))

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        pairs = zip(self.teacher.parameters(), unwrap_model(runner.model).parameters())
        for mine, theirs in pairs if self.momentum else ():
            mine.data.mul_(1 - self.momentum).add_(theirs.data, alpha=self.momentum)


@MODELS.register_module(force=True)
class HidesTeacher(NoisyModel):
    """Keeps a frozen teacher out of its weights, as mmdet's distillation does."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.teachers = [copy.deepcopy(self), ComparesByValue(2, 2)]


class ReadsOthers:
    """A loop over several loaders, as mmaction2's MultiLoaderEpochBasedTrainLoop."""

    def __init__(self, runner, dataloader, others, **kwargs):
        super().__init__(runner, dataloader, **kwargs)
        self.others = [runner.build_dataloader(each, seed=runner.seed) for each in others]


def _mixed(batch, others):
    for number, other in enumerate(others):
        batch['inputs'] = batch['inputs'] + 0.1 * (number + 1) * other['inputs']
    return batch


@LOOPS.register_module(force=True)
class ZipsLoaders(ReadsOthers, EpochBasedTrainLoop):
    """Begins all loaders in each epoch; the shortest ends it."""

    def run_epoch(self):
        self.runner.call_hook('before_train_epoch')
        self.runner.model.train()
        for other in self.others:
            if hasattr(other.sampler, 'set_epoch'):
                other.sampler.set_epoch(self._epoch)
        for idx, (batch, *others) in enumerate(zip(self.dataloader, *self.others)):
            self.run_iter(idx, _mixed(batch, others))
        self.runner.call_hook('after_train_epoch')
        self._epoch += 1


@LOOPS.register_module(force=True)
class DrawsFromOthers(ReadsOthers, IterBasedTrainLoop):
    """Reads a batch of each loader in an iteration."""

    def run_iter(self, data_batch):
        if not hasattr(self, 'iterators'):
            self.iterators = [_InfiniteDataloaderIterator(each) for each in self.others]
        super().run_iter(_mixed(data_batch, [next(each) for each in self.iterators]))


class Remembers:
    """A loop that scales batches by plain attributes, as mmrazor's keep candidates and flags."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.first, self.means, self.clock = True, [], Clock()

    def scaled(self, batch):
        self.means = [*self.means[-2:], float(batch['inputs'].mean())]
        scale = 1 + self.first + self.clock.tick() + sum(self.means) / 50
        self.first = False
        batch['inputs'] = batch['inputs'] * scale
        return batch


@LOOPS.register_module(force=True)
class RemembersByEpoch(Remembers, EpochBasedTrainLoop):
    def run_iter(self, idx, data_batch):
        super().run_iter(idx, self.scaled(data_batch))


@LOOPS.register_module(force=True)
class RemembersByIter(Remembers, IterBasedTrainLoop):
    def run_iter(self, data_batch):
        super().run_iter(self.scaled(data_batch))


@HOOKS.register_module(force=True)
class SetsUpLast(Hook):
    """A hook that is called after the checkpoint hook, as mmrazor's DumpSubnetHook."""

    priority = 'VERY_LOW'

    def __init__(self):
        self.scale = None

    def before_train(self, runner):
        self.scale = 0.7

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        data_batch['inputs'].mul_(self.scale)


@HOOKS.register_module(force=True)
class ReadsByItself(Hook):
    """A hook with a loader of its own, from which it reads every second iteration."""

    def __init__(self, loader):
        self.loader = loader

    def before_train(self, runner):
        self.data = _InfiniteDataloaderIterator(runner.build_dataloader(self.loader, seed=3))

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter % 2:
            data_batch['inputs'].add_(next(self.data)['inputs'])


@HOOKS.register_module(force=True)
class BeginsEpochs(Hook):
    """A hook that counts and draws when an epoch begins, which a resumed run repeats."""

    def __init__(self):
        self.begun, self.scale = 0, 1.0

    def before_train_epoch(self, runner):
        self.begun += 1
        self.scale = 0.5 + float(np.random.rand())

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        data_batch['inputs'].mul_(self.scale + 0.1 * self.begun)


@HOOKS.register_module(force=True)
class BeginsWithState(BeginsEpochs):
    """The same with a state that it saves itself."""

    def state_dict(self):
        return dict(begun=self.begun, scale=self.scale)

    def load_state_dict(self, state):
        self.begun, self.scale = state['begun'], state['scale']


@HOOKS.register_module(force=True)
class BeginsFirst(BeginsEpochs):
    """The same before all other hooks, in a method that it puts in the place of its class's."""

    priority = 'HIGHEST'

    def __init__(self):
        super().__init__()
        self.before_train_epoch = self.begin

    def begin(self, runner):
        super().before_train_epoch(runner)
        self.begun += 1


def _loader(size=20, **changes):
    return loader(dataset=dict(type='NoisyDataset', indices=size), **changes)


def _zipped(*others, **options):
    loop = dict(type='ZipsLoaders', max_epochs=4, val_interval=2, others=list(others))
    return dict(train_cfg=loop, **options)


def _drawn(*others):
    loop = dict(type='DrawsFromOthers', max_iters=20, val_interval=10, others=list(others))
    return dict(by_epoch=False, train_cfg=loop)


@DATA_SAMPLERS.register_module(force=True)
class DrawsByItself(Sampler):
    """A sampler with generators of its own, which counts its passes."""

    def __init__(self, dataset, seed=None, shuffle=True):
        self.size, self.epoch = len(dataset), 0
        self.one, self.two = torch.Generator().manual_seed(7), np.random.RandomState(8)
        self.three, self.four = np.random.default_rng(9), random.Random(10)

    def __iter__(self):
        order = torch.randperm(self.size, generator=self.one).tolist()
        self.two.shuffle(order)
        self.three.shuffle(order)
        self.four.shuffle(order)
        yield from order[self.epoch % 3 :] + order[: self.epoch % 3]
        self.epoch += 1  # and it has no set_epoch

    def __len__(self):
        return self.size


@DATA_SAMPLERS.register_module(force=True)
class KeepsTheRest(Sampler):
    """Batches, of which what is left of a pass comes first in the next one."""

    def __init__(self, sampler, batch_size):
        self.sampler, self.batch_size, self.rest = sampler, batch_size, []

    def __iter__(self):
        for index in self.sampler:
            self.rest.append(index)
            if len(self.rest) == self.batch_size:
                yield self.rest[:]
                del self.rest[:]

    def __len__(self):
        return len(self.sampler) // self.batch_size


_RANDOM = dict(type='GlobalRandomSampler')
_OWN = dict(type='DrawsByItself')
_BEGIN = [dict(type='BeginsEpochs'), dict(type='BeginsWithState')]
_INFINITE = dict(type='InfiniteSampler', shuffle=True)
_WORKERS = dict(num_workers=1, persistent_workers=True)

#: One training each; for :func:`resuming.tiny`. The second loader of `drawn` has 3 batches.
KEPT = dict(
    plain=dict(
        model=dict(type='BeginsFrozen', data_preprocessor=dict(type='Resizes')),
        custom_hooks=[dict(type='EMAHook'), dict(type='Cools'), dict(type='Unfreezes')],
        train_cfg__val_interval=1,
    ),
    plain_by_iter=dict(
        by_epoch=False, model=dict(type='Keeps'), custom_hooks=[dict(type='Cools')]
    ),
    zipped=_zipped(_loader(24), _loader(28, sampler=_RANDOM)),
    zipped_infinite=_zipped(_loader(24, sampler=_INFINITE)),
    zipped_with_workers=_zipped(_loader(24, num_workers=1), _loader(28, **_WORKERS)),
    drawn=_drawn(_loader(12), _loader(16, sampler=_RANDOM)),
    drawn_with_workers=_drawn(_loader(12, **_WORKERS), _loader(24, sampler=_INFINITE)),
    loop=dict(train_cfg=dict(type='RemembersByEpoch', max_epochs=4, val_interval=2)),
    loop_by_iter=dict(
        by_epoch=False, train_cfg=dict(type='RemembersByIter', max_iters=20, val_interval=10)
    ),
    participant=dict(custom_hooks=[dict(type='Teaches')]),
    begins=dict(custom_hooks=_BEGIN),
    begins_first=dict(custom_hooks=[dict(type='BeginsFirst')]),
    begins_last=dict(custom_hooks=[dict(type='SetsUpLast'), *_BEGIN]),
    begins_by_iter=dict(by_epoch=False, custom_hooks=_BEGIN),
    sampler=dict(train_dataloader=_loader(sampler=_OWN)),
    sampler_by_iter=dict(by_epoch=False, train_dataloader=_loader(sampler=_OWN, **_WORKERS)),
    batch_sampler=dict(
        train_dataloader=_loader(
            22, num_workers=1, drop_last=False, batch_sampler=dict(type='KeepsTheRest')
        )
    ),
    hook=dict(custom_hooks=[dict(type='ReadsByItself', loader=_loader(12, sampler=_RANDOM))]),
)
