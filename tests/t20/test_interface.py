"""The stand-in offers what the vendor's source lists as public."""

import ast
import importlib
import inspect

import pytest

from tests.t20.conftest import FOLDER

pytestmark = pytest.mark.t20


def read_names():
    """Read ``vendor_names.txt``: pairs of a module and a line."""
    found, module = [], None
    for line in (FOLDER / 'vendor_names.txt').read_text().splitlines():
        if line.startswith('['):
            module = line.strip('[]')
        elif line and not line.startswith('#'):
            found.append((module, line))
    return found


def resolve(module, path):
    found = importlib.import_module(module)
    for name in path.split('.'):
        found = getattr(found, name)
    return found


def parameters_of(source, names):
    """Describe parameters in a module's source: name, kind and default's value."""
    arguments = ast.parse(f'def function({source}): pass').body[0].args
    plain = arguments.args
    defaults = [None] * (len(plain) - len(arguments.defaults)) + arguments.defaults
    pairs = [*zip(plain, defaults), *zip(arguments.kwonlyargs, arguments.kw_defaults)]

    def value(node):
        if node is None:
            return inspect.Parameter.empty
        return eval(compile(ast.Expression(node), 'vendor', 'eval'), names)

    found = {argument.arg: value(default) for argument, default in pairs}
    stars = [star and star.arg for star in (arguments.vararg, arguments.kwarg)]
    return found, stars, [argument.arg for argument in arguments.kwonlyargs]


def describe(function):
    parameters = inspect.signature(function).parameters.values()
    kind = inspect.Parameter
    stars = [
        next((p.name for p in parameters if p.kind is star), None)
        for star in (kind.VAR_POSITIONAL, kind.VAR_KEYWORD)
    ]
    named = {
        p.name: p.default
        for p in parameters
        if p.kind not in (kind.VAR_POSITIONAL, kind.VAR_KEYWORD)
    }
    return named, stars, [p.name for p in parameters if p.kind is kind.KEYWORD_ONLY]


@pytest.mark.parametrize(('module', 'line'), read_names())
def test_name_of_the_vendor(torch_gcu, module, line):
    if ' = ' in line:
        path, expected = line.split(' = ')
        value = resolve(module, path)
        assert getattr(value, 'value', value) == ast.literal_eval(expected)
    elif line.endswith(')'):
        path, source = line[:-1].split('(', 1)
        names = vars(importlib.import_module(module))
        if 'cls' in source:  # a bound class method shows no `cls`
            source = source.replace('cls, ', '')
        function = resolve(module, path)
        assert callable(function)
        assert describe(function) == parameters_of(source, dict(names))
    else:
        assert resolve(module, line) is not None or line in ('GroupMember.WORLD', 'group.WORLD')


def test_nothing_else_is_public(torch_gcu):
    listed = {line.split('(')[0] for module, line in read_names() if module == 'torch_gcu'}
    modules = {'core', 'distributed', 'utils', 'multiprocessing', 'pytorch_override', 'MISSING'}
    assert {name for name in vars(torch_gcu) if not name.startswith('_')} - listed <= modules
