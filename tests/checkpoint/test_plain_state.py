"""Plain attributes that change while training: which of them a warning names."""

import random
import re

import numpy as np
import torch
from mmengine.hooks import Hook

from mmdevplug.checkpoint.plain_state import PlainState
from mmdevplug.runner import DeviceRunner
from tests.jobs import digits_config, messages_of


class Draws(Hook):
    """A hook that holds generators."""


def test_generators_are_named_unless_they_are_those_of_the_process(tmp_path):
    runner = DeviceRunner.from_cfg(digits_config('cpu', tmp_path))
    own = dict(one=random.Random(1), two=np.random.RandomState(2), three=torch.Generator())
    shared = dict(a=random._inst, b=np.random.mtrand._rand, c=torch.default_generator)
    hook = Draws()
    vars(hook).update({**own, **shared})
    runner.register_hook(hook)
    state = PlainState(runner)

    def named():
        with messages_of(runner.logger) as messages:
            assert not state.state_dict()
        return messages

    random.random(), np.random.rand(), torch.rand(1)
    assert named() == []
    own['one'].random(), own['two'].rand(), torch.rand(1, generator=own['three'])
    (message,) = named()
    names = re.findall(r'Draws/1\.(\w+) \(', message)
    assert names == ['one', 'three', 'two']
