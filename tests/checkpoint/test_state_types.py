"""Values of other types in a checkpoint to resume from are refused with their key."""

import io

import pytest
import torch

from mmdevplug.errors import CheckpointError
from mmdevplug.utils.state_types import Maybe, differences
from tests.checkpoint.training import build
from tests.jobs import load_file
from tests.ranks import in_ranks


def place(value, path, new):
    """A copy of nested containers with another value at a path."""
    if not path:
        return new
    name, *rest = path
    copied = list(value) if isinstance(value, (list, tuple)) else dict(value)
    copied[name] = place(value[name], rest, new)
    return copied


#: What is changed, beginning with ``rank`` in the states of a rank, and the key in the message.
CHANGED = {
    'meta.epoch': (('meta', 'epoch'), 1.5),
    'meta.iter': (('meta', 'iter'), dict(a=1)),
    'meta.counts_epochs': (('meta', 'counts_epochs'), None),
    'meta.kinds.': (('meta', 'kinds', ''), 5),
    'message_hub': (('message_hub',), [1]),
    'message_hub.log_scalars.train/loss': (('message_hub', 'log_scalars', 'train/loss'), None),
    'message_hub.resumed_keys.epoch': (('message_hub', 'resumed_keys', 'epoch'), None),
    'optimizer': (('optimizer',), -3.5),
    'optimizer.state[0]': (('optimizer', 'state', 0), 5),
    'optimizer.state[1].exp_avg': (('optimizer', 'state', 1, 'exp_avg'), None),
    'optimizer.param_groups[0].lr': (('optimizer', 'param_groups', 0, 'lr'), None),
    'optimizer.param_groups[0].betas': (('optimizer', 'param_groups', 0, 'betas'), 5),
    'param_schedulers[0].last_step': (('param_schedulers', 0, 'last_step'), 'x'),
    'param_schedulers': (('param_schedulers',), 5),
    'train_loader.passes': (('rank', 'train_loader', 'passes'), 'x'),
    "'train_loader'": (('rank', 'train_loader', 'kept', 0), 5),
    'random.python': (('rank', 'random', 'python'), -3.5),
    'hook SafeCheckpointHook/1': (('rank', 'hook SafeCheckpointHook/1'), [1]),
    'buffers': (('rank', 'buffers'), dict(a=1)),
    "'plain'": (('rank', 'plain'), [1]),
}


@in_ranks(timeout=200)
def test_every_value_of_another_type_is_named(tmp_path):
    build(tmp_path, length=1).train()
    whole = load_file(tmp_path / 'epoch_1.pth')
    said = {}
    for key, (path, value) in CHANGED.items():
        changed = dict(whole)
        if path[0] == 'rank':
            stream = io.BytesIO()
            packed = whole['mmdevplug']['ranks'][0]
            state = load_file(io.BytesIO(packed.numpy().tobytes()))
            torch.save(place(state, path[1:], value), stream)
            ranks = [torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)]
            changed['mmdevplug'] = dict(whole['mmdevplug'], ranks=ranks)
        else:
            changed = place(whole, path, value)
        torch.save(changed, tmp_path / 'changed.pth')
        runner = build(tmp_path, length=2, resume=True)
        runner._load_from = str(tmp_path / 'changed.pth')
        with pytest.raises(CheckpointError) as refused:
            runner.train()
        said[key] = str(refused.value)
    for key, text in said.items():
        assert 'Cannot resume: ' in text
        assert key in text
        assert 'changed.pth' in text


@pytest.mark.parametrize(
    ('found', 'like', 'count'),
    [
        (dict(a=1, b=5), dict(a=0, c=0), 0),
        (dict(a=1.0), dict(a=0), 0),
        (dict(a=1.5), dict(a=0), 1),
        (dict(a=float('nan')), dict(a=0), 1),
        (dict(a=float('inf')), dict(a=0.5), 0),
        (dict(a=True), dict(a=0.5), 1),
        (dict(a=None), dict(a=Maybe(0)), 0),
        (dict(a=torch.ones(())), dict(a=0.5), 0),
        ((1, 'x'), [1.0, 2.0], 1),
        (5, None, 0),
    ],
)
def test_what_differs(found, like, count):
    assert len(list(differences(found, like, ''))) == count
