"""Checkpoints of another model, in part of this one, or no checkpoints at all."""

from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.infer import BaseInferencer
from mmengine.logging import MMLogger
from mmengine.model import BaseModule
from mmengine.registry import MODEL_WRAPPERS, RUNNERS
from torch import nn

from mmdevplug.checkpoint.load_model import load_model
from mmdevplug.checkpoint.saving import weights_of
from mmdevplug.errors import CheckpointError
from mmdevplug.patches.load_weights import load_weights
from mmdevplug.patches.mmengine import patch_mmengine, restore_mmengine
from mmdevplug.utils.model import unwrap_model
from tests.checkpoint.training import TESTED, build, config
from tests.jobs import messages_of, note
from tests.ranks import in_ranks


def small():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def load(state_dict, model=None, strict=False, **options):
    options.update(strict=strict, revise_keys=[('^module.', '')])
    return load_model(model or small(), dict(state_dict=state_dict), 'some.pth', **options)


def renamed(state_dict, start):
    """Weights, each with a beginning of its name."""
    return {f'{start}{name}': value for name, value in state_dict.items()}


class Wraps(nn.Module):
    """A wrapper that MMEngine does not know as one."""

    def __init__(self, module=None):
        super().__init__()
        self.module = module or small()


@MODEL_WRAPPERS.register_module(force=True)
class KnownWrapper(Wraps):
    pass


class Renames(nn.Linear):
    """Loads weights of an older release under their old name."""

    _version = 2

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        if local_metadata.get('version', 1) < 2:
            state_dict[prefix + 'weight'] = state_dict.pop(prefix + 'kernel')
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def test_all_of_a_model_is_loaded_without_a_word():
    source, model = small(), small()
    weights = renamed(source.state_dict(), 'module.')
    del weights['module.1.num_batches_tracked']
    assert load(weights, model) is None
    assert torch.equal(model[2].weight, source[2].weight)
    assert load_weights(Renames(2, 1), dict(kernel=torch.ones(1, 2), bias=torch.ones(1))).complete
    assert load(Renames(2, 1).state_dict(), Renames(2, 1)) is None


def test_names_of_wrappers_inside_of_a_model_are_read_and_compared():
    """As MMSeparateDistributedDataParallel saves them."""
    source, model = small(), nn.ModuleDict(dict(part=KnownWrapper()))
    weights = renamed(source.state_dict(), 'part.module.')
    assert load(weights, model, resuming=True) is None
    assert torch.equal(model['part'].module[2].weight, source[2].weight)
    assert load({k.replace('module.', ''): v for k, v in weights.items()}, model) is None
    saved, part = (nn.ModuleDict(dict(part=KnownWrapper(Renames(2, 1)))) for _ in range(2))
    assert load(weights_of(saved), part) is None
    assert load(weights_of(saved), nn.ModuleDict(dict(part=Renames(2, 1)))) is None
    del weights['part.module.2.weight']
    with pytest.raises(CheckpointError, match='Cannot resume.*part.2.weight'):
        load(weights, model, resuming=True)


@pytest.mark.parametrize('start', ['', 'module.'])
def test_weights_reach_what_an_unknown_wrapper_holds(start):
    source, model = small(), Wraps()
    weights = renamed(source.state_dict(), start)
    assert load(weights, model) is None
    assert torch.equal(model.module[2].weight, source[2].weight)
    with pytest.raises(CheckpointError, match='no key of checkpoint some.pth fits the model'):
        load({f'{start}other.weight': torch.ones(2)}, Wraps())


@pytest.mark.parametrize(
    ('name', 'value', 'said'),
    [
        (
            '2.bias',
            None,
            '7 of 8 names of the model loaded, 1 missing in the checkpoint (2.bias). ',
        ),
        (
            '3.bias',
            torch.ones(2),
            '8 of 8 names of the model loaded, 1 unexpected in it (3.bias).',
        ),
        (
            '2.weight',
            torch.ones(5, 4),
            '1 of other shapes (2.weight: (5, 4) in the checkpoint, (2, 4) in the model)',
        ),
    ],
    ids=['missing', 'extra', 'other'],
)
def test_what_fits_in_part_is_named_with_counts(name, value, said):
    weights = small().state_dict()
    weights[name] = value
    if value is None:
        del weights[name]
    assert said in load(weights)
    with pytest.raises(CheckpointError, match='Expected all of it: strict=True'):
        load(weights, strict=True)
    if name == '3.bias':
        assert load(weights, resuming=True)
    else:
        with pytest.raises(CheckpointError, match='Cannot resume: .*load_from=some.pth'):
            load(weights, resuming=True)


def test_what_is_not_trained_may_be_missing_when_a_run_is_resumed():
    model = small()
    model[2].requires_grad_(False)
    weights = {name: value for name, value in small().state_dict().items() if name[0] != '2'}
    assert '2 missing in the checkpoint (2.weight, 2.bias)' in load(weights, model, resuming=True)


@pytest.mark.parametrize(
    ('weights', 'hint'),
    [
        (
            dict(a=torch.ones(1), b=torch.ones(1)),
            'The checkpoint has 2: a, b; the model has 6: 0.weight',
        ),
        ({}, 'The checkpoint has 0: none'),
        (dict(model=dict(small().state_dict())), 'It holds more under model: save the weights'),
        (renamed(small().state_dict(), 'backbone.'), "prefix='backbone.'"),
        (dict(nn.Linear(9, 9).state_dict()), 'by model.0.init_cfg='),
        (
            {name: torch.ones(9, 9) for name in small().state_dict()},
            'Of other shapes: 0.weight: (9, 9) in the checkpoint, (4, 3) in the model; ',
        ),
    ],
    ids=['other', 'empty', 'nested', 'prefixed', 'part', 'shapes'],
)
def test_a_checkpoint_of_another_model_is_refused(weights, hint):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 2))
    with pytest.raises(CheckpointError, match='no key of checkpoint some.pth fits') as refused:
        load(weights, model)
    assert hint in str(refused.value)


class Part(BaseModule):
    """Initialized as a config says."""

    def __init__(self, init_cfg):
        super().__init__(init_cfg)
        self.layer = nn.Linear(2, 2)


def test_inferencers_and_init_cfg_refuse_too(tmp_path, monkeypatch):
    path = str(tmp_path / 'of_another.pth')
    weights = {'backbone.layer.weight': torch.ones(2, 2), 'backbone.layer.bias': torch.ones(2)}
    torch.save(dict(state_dict=weights), path)
    part = Part(dict(type='Pretrained', checkpoint=path, prefix='backbone.'))
    try:
        patch_mmengine('cpu')
        part.init_weights()
        assert part.layer.weight.tolist() == [[1, 1], [1, 1]]
        with pytest.raises(CheckpointError, match=f'{path} fits the model.*prefix='):
            Part(dict(type='Pretrained', checkpoint=path)).init_weights()
        with pytest.raises(CheckpointError, match=f'no key of checkpoint {path} fits'):
            BaseInferencer._init_model(
                _Inferencer(), Config(dict(model=dict(type='NoisyModel'))), path, 'cpu'
            )
    finally:
        restore_mmengine()


class _Inferencer:
    """What ``BaseInferencer._init_model`` needs of an inferencer."""

    scope = 'mmengine'
    _load_weights_to_model = BaseInferencer._load_weights_to_model

    def __getattr__(self, name):
        return getattr(BaseInferencer, name).__get__(self)


FILES = dict(
    html=(b'<!DOCTYPE html><html>Sign in</html>', 'an HTML or XML page'),
    pointer=(b'version https://git-lfs.github.com/spec/v1\noid sha256:0\n', 'git lfs pull'),
    empty=(b'', 'an empty file'),
    json=(b'{"a": 1}', 'a text file'),
    garbage=(b'PK' + bytes(range(256)) * 9, 'no checkpoint of PyTorch: it begins with'),
    zipped=(b'PK\x03\x04' + bytes(range(256)) * 9, 'truncated'),
    old=(b'\x80\x02' + bytes(range(256)) * 9, 'cannot be read'),
)


@in_ranks()
def test_files_that_are_no_checkpoint_are_named_in_one_line(tmp_path):
    """What a test, a training with load_from and one with resume say of each file."""
    cases = [(f'{name}.pth', how) for name in FILES for how in ('test', 'load_from', 'resume')]
    for name, (content, _) in FILES.items():
        (tmp_path / f'{name}.pth').write_bytes(content)
    said = {}
    for name, how in [*cases, ('missing.pth', 'test'), ('', 'test')]:
        path = str(tmp_path / name)
        runner = build(tmp_path / 'work', load_from=path, resume=how == 'resume', **TESTED)
        with pytest.raises(CheckpointError) as refused:
            runner.test() if how == 'test' else runner.train()
        said[name, how] = str(refused.value)
    assert 'can not be found' in said.pop(('missing.pth', 'test'))
    assert 'is a directory' in said.pop(('', 'test'))
    for (name, how), text in said.items():
        assert FILES[Path(name).stem][1] in text or 'damaged' in text, (name, how)
        assert str(tmp_path / name) in text
        assert len(text.splitlines()) == 1


def first_bias(runner):
    return runner.epoch, float(unwrap_model(runner.model).net[6].bias[0].detach())


@in_ranks()
def test_what_fits_in_part_is_said(tmp_path):
    """What is logged, line by line, when a checkpoint without a head is tested and validated."""
    runner = build(tmp_path, **TESTED)
    weights = runner.model.state_dict()
    del weights['net.6.bias']
    hub = dict(log_scalars={}, runtime_info={}, resumed_keys={})
    meta = dict(epoch=1, iter=8)
    torch.save(dict(state_dict=weights, meta=meta, message_hub=hub), tmp_path / 'part.pth')
    torch.save(dict(state_dict=dict(a=torch.ones(1)), meta={}), tmp_path / 'other.pth')
    found = {}
    for how, name in (('test', 'part'), ('val', 'part'), ('train', 'part'), ('train', 'other')):
        options = dict(experiment_name=f'{how} {name}', resume=how == 'train', **TESTED)
        runner = build(tmp_path, load_from=str(tmp_path / f'{name}.pth'), **options)
        with messages_of(MMLogger.get_current_instance()) as lines:
            try:
                getattr(runner, how)()
            except CheckpointError as error:
                lines.append(f'{error}')
        found[how, name] = lines
    text = '1 missing in the checkpoint (net.6.bias)'
    for how in ('test', 'val'):
        assert [text in line for line in found[how, 'part']].count(True) == 1, found
    assert found['train', 'part'][-1].startswith('Cannot resume: Checkpoint ')
    assert text in found['train', 'part'][-1]
    assert 'no key of checkpoint' in found['train', 'other'][-1]


@in_ranks()
def test_training_that_has_nothing_to_resume_yet_begins_with_load_from(tmp_path):
    """The epoch and a bias with which training begins, by who asks to resume, twice each."""
    weights = {
        name: torch.full_like(w, 0.5) for name, w in build(tmp_path).model.state_dict().items()
    }
    torch.save(dict(state_dict=weights), tmp_path / 'first.pth')
    Config(config('', load_from=str(tmp_path / 'first.pth'), **TESTED)).dump(tmp_path / 'c.py')
    found = {}
    # Our command, MMEngine's runner alone as mmseg's script, and mmdet's, which removes load_from.
    for who, asks in dict(ours=dict(resume='auto'), mmseg={}, mmdet=dict(load_from=None)).items():
        for turn in range(2):
            cfg = Config.fromfile(tmp_path / 'c.py')
            cfg.merge_from_dict(dict(dict(work_dir=str(tmp_path / who), resume=True), **asks))
            cfg.train_cfg.max_epochs, cfg.experiment_name = 1 + turn, f'{who}{turn}'
            runner = RUNNERS.build(cfg)
            begun = note(runner, 'before_train_epoch', first_bias)
            runner.train()
            found.setdefault(who, []).extend(begun)
    for who, ((first, bias), (second, _)) in found.items():
        assert (first, bias, second) == (0, 0.5, 1), who
