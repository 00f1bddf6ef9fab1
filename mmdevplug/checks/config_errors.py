"""Name the key of the config that an error of MMEngine's registries or of a data set is about."""

import re
from traceback import walk_tb
from types import FrameType
from typing import Dict, Iterable, Iterator, List, Mapping, Optional, Tuple

from mmengine.config import Config
from mmengine.registry import OPTIMIZERS, Registry

from mmdevplug.config.fields import did_you_mean
from mmdevplug.errors import chain

Part = Tuple[str, Mapping[str, object]]


def explain_config(error: Exception) -> Optional[str]:
    """Say in a sentence which key of the config is wrong; None if that is not known."""
    causes = chain(error)
    frames = [frame for each in causes for frame, _ in walk_tb(each.__traceback__)]
    cfg = _find_config(frames)
    inner = causes[-1]
    if isinstance(inner, KeyError):
        own = [frame for frame, _ in walk_tb(inner.__traceback__)]
        return _explain_type(inner, own, [] if cfg is None else list(_parts(cfg)))
    if cfg is None:
        return None
    if isinstance(inner, (FileNotFoundError, NotADirectoryError)):
        return _explain_file(inner, list(_parts(cfg)))
    for frame in frames if isinstance(inner, TypeError) else ():
        # MMEngine asks for the arguments of what it has not found.
        if frame.f_locals.get('optimizer_cls', frame) is None:
            name = frame.f_locals['optimizer_cfg']['type']
            return _explain_unknown(name, OPTIMIZERS, list(_parts(cfg)))
    return None


def _find_config(frames: List[FrameType]) -> Optional[Config]:
    """Find the config of the job among what functions hold that an error went through."""
    for frame in frames:
        held = frame.f_locals
        runners = (held.get('runner'), held.get('self'))
        for value in (held.get('cfg'), *(getattr(each, 'cfg', None) for each in runners)):
            if isinstance(value, Config):
                return value
    return None


def _parts(value: object, path: str = '') -> Iterator[Part]:
    """Yield all dicts of a config with their keys, as ``--cfg-options`` takes them."""
    if isinstance(value, (Mapping, Config)):
        if path:
            yield path, value
        items: Iterable[Tuple[object, object]] = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        return
    for key, each in items:
        yield from _parts(each, f'{path}.{key}' if path else str(key))


def _explain_type(error: KeyError, frames: List[FrameType], parts: List[Part]) -> Optional[str]:
    """Explain a part of the config without a type, or with one that no registry has."""
    said = str(error.args[0]) if error.args else ''
    held = frames[-1].f_locals if frames else {}
    if 'mmengine' not in (frames[-1].f_globals['__name__'] if frames else ''):
        return None
    if said == 'type' or 'must contain the key "type"' in said:
        # Of a function that builds, or of ConfigDict.
        keys = set(next((held[one] for one in ('cfg', 'self') if one in held), ()))
        lacking = {path: set(each) for path, each in parts if each and 'type' not in each}
        fitting = {path: own for path, own in lacking.items() if own <= keys}
        most = max(map(len, fitting.values()), default=0)
        found = [path for path, own in fitting.items() if len(own) == most]
        where = ' or '.join(found[:3]) or 'a part of the config'
        return f'{where} has no type. Add it: dict(type=..., ...) with the name of a class.'
    registry, name = held.get('registry'), held.get('obj_type', held.get('scheduler_type'))
    if registry is None or not isinstance(name, str) or 'is not in the' not in said:
        return None
    return _explain_unknown(name, registry, parts)


def _explain_unknown(name: str, registry: Registry, parts: List[Part]) -> str:
    known: Dict[str, object] = {}
    each: Optional[Registry] = registry
    while each is not None:
        known.update(each.module_dict)
        each = each.parent
    found = [f'{path}.type' for path, part in parts if part.get('type') == name]
    return (
        f'{" and ".join(found[:3]) or "type"}={name!r}: no class of this name is registered as '
        f'{registry.name!r} of {registry.scope}{did_you_mean([name], known)} Correct it, or '
        f"import the module that registers it: custom_imports=dict(imports=['package.module'])."
    )


def _value(found: str) -> str:
    return found.partition('=')[2].strip('\'"')


def _explain_file(error: OSError, parts: List[Part]) -> Optional[str]:
    """Name the keys whose values a path is made of, in the data set that has most of them."""
    # An error of a loader's worker has the path in its text alone.
    quoted = re.findall(r'No such file or directory: [\'"]([^\'"]+)', str(error))
    name = str(error.filename or (quoted[-1] if quoted else ''))
    found: Dict[str, List[str]] = {}
    for path, part in parts:
        for key, value in part.items():
            if not isinstance(value, str) or not value.strip('/'):
                continue
            value = value.rstrip('/')
            if value == name or name.startswith(f'{value}/') or name.endswith(f'/{value}'):
                found.setdefault(path.partition('.')[0], []).append(f'{path}.{key}={value!r}')
    keys = max(found.values(), key=len, default=[])
    # Without a word such as split='train', which ends what another key says whole.
    keys = [one for one in keys if not any(f'/{_value(one)}' in _value(each) for each in keys)]
    if not keys:
        return None
    return (
        f'{name!r} is not there. The config says {" and ".join(keys[:4])}: correct it in the '
        f'config, or on the command line with --cfg-options.'
    )
