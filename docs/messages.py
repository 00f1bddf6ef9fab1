"""What mmdevplug can say when something is wrong, read from its source."""

import ast
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Tuple

from options_page import kinds, parts

PACKAGE = Path(__file__).parents[1] / 'mmdevplug'
#: What stands for the parts of a message that differ from one time to the next.
GAP = '…'
#: A message with fewer letters of its own is put together elsewhere.
_LEAST = 12
#: What Python's own protocols ask for, or is caught and explained in other words.
_INTERNAL = ('Attribute', 'Key', 'Type', 'pickle.', 'Unencodable')


class Message(NamedTuple):
    """An error or a warning.

    Attributes:
        place (str): File and line of the ``raise``.
        kind (str): Name of the class, or 'warning'.
        text (str): What it says, gaps in place of values.
    """

    place: str
    kind: str
    text: str


def messages() -> Iterator[Message]:
    """All errors of our own and all warnings of the package whose text is in one place."""
    yield from _refusals_of_options()
    for path in sorted(PACKAGE.rglob('*.py')):
        tree = ast.parse(path.read_text(encoding='utf-8'))
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            texts = _named_texts(function)
            for node, kind, said in _said(function):
                text = _text(said, texts)
                if sum(letter.isalpha() for letter in text) >= _LEAST:
                    yield Message(f'{path.relative_to(PACKAGE)}:{node.lineno}', kind, text)


def all_texts() -> List[str]:
    """Every text in the source, whether it is raised in place or handed on."""
    found = [message.text for message in _refusals_of_options()]
    for path in sorted(PACKAGE.rglob('*.py')):
        tree = ast.parse(path.read_text(encoding='utf-8'))
        for node in ast.walk(tree):
            if isinstance(node, (ast.JoinedStr, ast.BinOp, ast.Constant)):
                found.append(_text(node, {}))
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            texts = _named_texts(function)
            found += [_text(said, texts) for _, _, said in _said(function)]
    return found


def _refusals_of_options() -> Iterator[Message]:
    """The errors of ``Options.check``, put together as it does."""
    from mmdevplug.config.fields import options_of
    from mmdevplug.config.launch_options import LaunchOptions

    for kind in (each for key in (*kinds(), LaunchOptions) for each in (key, *parts(key))):
        for one in options_of(kind):
            if one.metadata['check'] is not None:
                # A message names the flag, or the variable.
                key = one.name if kind is LaunchOptions else f'{kind.key}.{one.name}'
                where = (
                    f'{kind.taken_by}.{one.name}={GAP} ({key})'
                    if kind.taken_by
                    else f'{key}={GAP}'
                )
                text = f'{where}: expected {one.metadata["check"].expected}.'
                yield Message(f'{kind.__module__}.{kind.__name__}', kind.error.__name__, text)


def _said(function: ast.FunctionDef) -> Iterator[Tuple[ast.AST, str, ast.AST]]:
    for node in ast.walk(function):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            kind = _dotted(node.exc.func)
            if kind.endswith('Error') and not kind.startswith(_INTERNAL):
                yield node, kind, node.exc.args[0]
        elif isinstance(node, ast.Call) and node.args and _warns(node):
            yield node, 'warning', node.args[0]


def _warns(call: ast.Call) -> bool:
    called = _dotted(call.func)
    # What `mmdevplug doctor` finds has its reason and its remedy beside it.
    return called.endswith(('.warning', 'warnings.warn')) and called != 'section.warning'


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f'{_dotted(node.value)}.{node.attr}'
    return node.id if isinstance(node, ast.Name) else ''


def _named_texts(function: ast.FunctionDef) -> Dict[str, str]:
    found: Dict[str, str] = {}
    for node in ast.walk(function):
        if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)):
            continue
        if isinstance(node.value, (ast.JoinedStr, ast.BinOp, ast.Constant)):
            found.setdefault(node.targets[0].id, _text(node.value, {}))
    return found


def _text(node: ast.AST, named: Dict[str, str]) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else GAP
    if isinstance(node, ast.JoinedStr):
        return ''.join(_text(part, named) for part in node.values)
    if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Name):
        return named.get(node.value.id, GAP)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left, named) + _text(node.right, named)
    if isinstance(node, ast.Name):
        return named.get(node.id, GAP)
    return GAP
