"""Explain keys of a config that are no arguments of what is built from them."""

import inspect
import re
import traceback
from contextlib import contextmanager
from types import FrameType, FunctionType
from typing import Any, Dict, Iterator, List, Optional, Tuple

from mmengine.registry import OPTIMIZERS, Registry

from mmdevplug.config.fields import did_you_mean, shortened
from mmdevplug.errors import DevPlugError

from .versions import chain, explain_import

#: Python 3.8 does not name the class.
_UNEXPECTED = re.compile(r"(?:(\w+)\.)?(\w+)\(\) got an unexpected keyword argument '(\w+)'")
_MISSING = re.compile(r'(?:(\w+)\.)?(\w+)\(\) missing \d+ required .* arguments?: (.*)')
#: What a registry says of a name that it does not know.
_UNKNOWN = re.compile(r'(\S+) is not in the .+? registry')
#: What MMEngine's runner builds where a dict has no type.
_USUAL = {
    'train_dataloader': ('DataLoader',),
    'val_dataloader': ('DataLoader',),
    'test_dataloader': ('DataLoader',),
    'train_cfg': ('EpochBasedTrainLoop', 'IterBasedTrainLoop'),
    'val_cfg': ('ValLoop',),
    'test_cfg': ('TestLoop',),
}
#: Where MMEngine calls a class or a function with the keys of a dict.
_BUILDS = ('build_from_cfg', 'get_instance', 'build_iter_from_epoch', 'build_dataloader')
_BUILDS += ('build_train_loop', 'build_val_loop', 'build_test_loop', 'setup_env')
#: Arguments that MMEngine fills in.
_FILLED = {'self', 'runner', 'dataloader', 'params', 'defaults'}


@contextmanager
def explain_arguments(cfg: Any) -> Iterator[None]:
    """Replace the error of a class that refuses a key by one that names the key of the config."""
    try:
        yield
    except (TypeError, KeyError) as error:
        # MMEngine raises those of hooks anew.
        for each in chain(error):
            told = None
            if isinstance(each, TypeError):
                told = _explain(each, cfg)
            elif isinstance(each, KeyError) and not explain_import(error):
                told = _explain_name(each, cfg)
            if told:
                raise DevPlugError(told) from error
        raise


def _explain(error: TypeError, cfg: Any) -> Optional[str]:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in frames:  # MMEngine asks for the arguments of an optimizer before it is found
        if 'optimizer_cfg' in frame.f_locals and frame.f_locals.get('optimizer_cls', '') is None:
            return _unknown_name(OPTIMIZERS, frame.f_locals['self'].optimizer_cfg['type'], cfg)
    unexpected, missing = _UNEXPECTED.match(str(error)), _MISSING.match(str(error))
    found = unexpected or missing
    if found is None or not frames or not hasattr(cfg, 'items'):
        return None
    frame = frames[-1]  # a call with wrong arguments fails in its caller
    if frame.f_code.co_name not in (*_BUILDS, '__init__', '__new__'):
        return None
    name = found.group(1) or (None if found.group(2) == '__init__' else found.group(2))
    classes = _classes(frame, name)
    names = [name for one in classes for name in (one.__name__, *_bases(one))]
    built = ' or '.join(one.__name__ for one in classes) or name or 'what is built from it'
    if unexpected is None:
        places = [path for path, _, kind in _dicts(cfg) if set(kind) & set(names)]
        return (
            f'{places[0]} lacks {found.group(3)}, which {built} needs. Add it.' if places else None
        )
    key = unexpected.group(3)
    places = [(path, one[key], kind) for path, one, kind in _dicts(cfg) if key in one]
    fit = [place for place in places if set(place[2]) & set(names)] or places
    if not fit:
        return None  # it is no key of the config
    known = sorted({name for one in classes for name in _arguments(one)} - _FILLED)
    path = ' or '.join(f'{path}.{key}' if path else key for path, _, _ in fit)
    return (
        f'{path}={shortened(fit[0][1])}: {built} has no argument {key!r}'
        f'{did_you_mean([key], known)} Correct the name or remove it; known: {", ".join(known)}.'
    )


def _explain_name(error: KeyError, cfg: Any) -> Optional[str]:
    """Explain a name that a registry does not know, though its package could be imported."""
    found = _UNKNOWN.match(str(error.args[0])) if error.args else None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if found is None or not isinstance(frames[-1].f_locals.get('registry'), Registry):
        return None
    return _unknown_name(frames[-1].f_locals['registry'], found.group(1), cfg)


def _unknown_name(registry: Registry, name: str, cfg: Any) -> str:
    known: Dict[str, None] = {}
    waiting = [registry.root]
    for one in waiting:
        known.update(dict.fromkeys(one.module_dict))
        waiting += one.children.values()
    place = [
        path for path, one, _ in _dicts(cfg) if hasattr(one, 'get') and one.get('type') == name
    ]
    return (
        f'{place[0] + "." if place else ""}type={name!r} is not among the {registry.name}s of '
        f'{registry.scope}{did_you_mean([name.rpartition(".")[2]], known)} Correct it, or import '
        f'what registers it: custom_imports = dict(imports=[...], allow_failed_imports=False)'
    )


def _classes(frame: FrameType, name: Any) -> List[Any]:
    """What was called in a frame: a class of that name, or by what builders call it."""
    held = frame.f_locals
    own = held.get('self')
    used = (frame.f_globals.get(one) for one in frame.f_code.co_names)
    if own is not None and frame.f_code.co_name == '__init__':  # of a class below, with the rest
        return [type(own)]
    builders = [held[one] for one in ('obj_cls', 'cls') if one in held]
    others = [one for one in (*held.values(), *used) if isinstance(one, (type, FunctionType))]
    named = [one for one in (*builders, *others) if getattr(one, '__name__', None) == name]
    below = [one for one in builders if name in _bases(one)]
    if named or below or builders:
        return (named or below or builders)[:1]
    usual = {each for names in _USUAL.values() for each in names}
    return list(dict.fromkeys(one for one in others if one.__name__ in usual))


def _bases(kind: Any) -> List[str]:
    return [one.__name__ for one in getattr(kind, '__mro__', ())[:-1]]


def _arguments(kind: Any) -> List[str]:
    """The names that a class, with those below it, or a function takes."""
    calls = [
        vars(one)['__init__'] for one in getattr(kind, '__mro__', ()) if '__init__' in vars(one)
    ]
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    found = []
    for call in calls or [kind]:
        try:
            parameters = inspect.signature(call).parameters.values()
        except (TypeError, ValueError):  # of C
            continue
        found += [one.name for one in parameters if one.kind in named]
    return found


def _dicts(cfg: Any, path: str = '') -> Iterator[Tuple[str, Any, Tuple[str, ...]]]:
    """Yield all dicts of a config: path, content, and the names of what is built from them."""
    if isinstance(cfg, (list, tuple)):
        for number, item in enumerate(cfg):
            yield from _dicts(item, f'{path}[{number}]')
    elif hasattr(cfg, 'items'):
        kind = cfg.get('type')
        name = (
            kind.rsplit('.', 1)[-1] if isinstance(kind, str) else getattr(kind, '__name__', None)
        )
        yield path, cfg, _USUAL.get(path, ()) if name is None else (name,)
        for key, item in cfg.items():
            yield from _dicts(item, f'{path}.{key}' if path else str(key))
