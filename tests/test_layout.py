"""The rooms of the package: imports go downwards, none in a circle, and tests mirror them."""

import ast
from functools import lru_cache
from pathlib import Path

import pytest

from mmdevplug.patches.autocast import UNTRACED
from tests.jobs import ROOT
from tests.tiers import has_a_branch

PACKAGE = ROOT / 'mmdevplug'
#: From the top to the bottom, as CONTRIBUTING.md has them. A room imports from those below it.
ROOMS = [
    'examples',
    'cli',
    'checks',
    'runner',
    'hooks',
    'gradients',
    'checkpoint',
    'sharding',
    'spmd',
    'model_parallel',
    'data',
    'model',
    'optim',
    'samples',
    'patches',
    'lazy',
    'distributed',
    'device_guard',
    'accelerators',
    'fault_tolerance',
    'environments',
    'config',
    'staged',
    'registry',
    'utils',
    'errors',
    'version',
]
#: Meet in the modules at the top of the package.
DOORS = ('__init__', '__main__', 'autopatch')
#: Configs are no code, and these rooms are tested through others.
WITHOUT_TESTS_OF_THEIR_OWN = {'configs', 'config', 'utils'}


def imported(name, path, known):
    """The modules of ours that a module imports, however deep inside a function."""
    package = ['mmdevplug', *name.split('.')][:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = '.'.join([*base, *filter(None, [node.module])])
            names = [f'{prefix}.{alias.name}' for alias in node.names]
        else:
            continue
        for full in names:
            parts = full.split('.')
            if parts[0] != 'mmdevplug':
                continue
            candidates = ['.'.join(parts[1:]), '.'.join(parts[1:-1])]
            candidates += [f'{each}.__init__' for each in candidates]
            found = next((each for each in candidates if each in known), None)
            if found is not None and found != name:
                yield found


def room_of(name):
    return name.split('.')[0]


def is_built(path):
    """Whether an installation has put it there: `.mim`, caches."""
    return any(part[0] == '.' for part in path.relative_to(PACKAGE).parts)


@lru_cache(maxsize=None)
def imports():
    """For each module what it imports."""
    paths = [path for path in sorted(PACKAGE.rglob('*.py')) if not is_built(path)]
    names = [path.relative_to(PACKAGE).with_suffix('').as_posix() for path in paths]
    known = {name.replace('/', '.'): path for name, path in zip(names, paths)}
    known = {name: path for name, path in known.items() if not name.startswith('configs.')}
    return {name: sorted(set(imported(name, path, known))) for name, path in known.items()}


def test_there_is_no_room_that_the_order_does_not_know():
    assert {room_of(name) for name in imports()} == {*ROOMS, *DOORS}


@pytest.mark.parametrize('room', ROOMS)
def test_a_room_imports_from_those_below_it_alone(room):
    upward = [
        f'{name} imports {other}'
        for name, others in imports().items()
        for other in others
        if room_of(name) == room
        and room_of(other) not in DOORS
        and ROOMS.index(room_of(other)) < ROOMS.index(room)
    ]
    assert not upward


def test_no_modules_import_each_other_in_a_circle():
    def reach(start):
        seen, left = set(), [start]
        while left:
            for other in imports().get(left.pop(), ()):
                if other not in seen:
                    seen.add(other)
                    left.append(other)
        return seen

    # A package's own __init__ gathers what its modules define, and they import each other.
    circles = [name for name in imports() if not name.endswith('__init__') and name in reach(name)]
    assert not circles


def test_rooms_that_are_not_traced_exist():
    """``torch.compile`` would silently trace a room that has another name now."""
    assert set(UNTRACED.split()) <= {path.name for path in PACKAGE.iterdir() if path.is_dir()}


def test_hooks_holds_hooks():
    for path in (PACKAGE / 'hooks').glob('*.py'):
        if path.stem in ('__init__', 'default_hooks'):
            continue
        kinds = [
            node
            for node in ast.parse(path.read_text(encoding='utf-8')).body
            if isinstance(node, ast.ClassDef)
        ]
        bases = {getattr(base, 'id', '') for kind in kinds for base in kind.bases}
        assert any(base.endswith('Hook') for base in bases), path.name


def test_every_room_has_its_tests():
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name[0] not in '_.'}
    tested = {path.name for path in Path(ROOT / 'tests').iterdir() if path.is_dir()}
    assert rooms - tested <= WITHOUT_TESTS_OF_THEIR_OWN


@pytest.mark.parametrize('page', ['CONTRIBUTING.md', 'CONTRIBUTING_zh-CN.md'])
def test_contributing_names_the_rooms_in_this_order(page):
    text = (ROOT / page).read_text(encoding='utf-8')
    places = [text.index(f'| `{room}/`') for room in ROOMS if (PACKAGE / room).is_dir()]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ('path', 'repeated'),
    [
        ('distributed/test_store_texts.py', True),  # imports utils/torch_compat.py
        ('samples/test_wire.py', False),
        ('samples/test_travel.py', True),
        ('gradients/test_wrapper_parity.py', True),  # its helper wraps models
        ('test_docs.py', False),
    ],
)
def test_pytorch_1_10_repeats_tests_whose_code_has_a_branch_for_it(path, repeated):
    assert has_a_branch(ROOT / 'tests' / path) == repeated
