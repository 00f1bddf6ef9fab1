"""The page of commands: it is what the parsers say, in both languages."""

import importlib
import shlex
import sys
from pathlib import Path

import pytest

from tests.commands import run

DOCS = Path(__file__).parents[2] / 'docs'


@pytest.fixture
def page(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    yield importlib.import_module('cli_page')
    for module in ('cli_page', 'tables'):
        sys.modules.pop(module, None)


@pytest.mark.parametrize('language', ['en', 'zh_cn'])
def test_the_page_is_made_of_the_parsers(page, language):
    written = (DOCS / language / 'command_line.md').read_text(encoding='utf-8')
    made = '\n\n'.join(page.render(page.TEXTS[language])) + '\n'
    assert written == made, 'run python docs/cli_page.py'


def test_every_example_is_taken_by_its_parser(page):
    parsers = page.commands()
    assert sorted(page.EXAMPLES) == sorted(parsers)
    for name, parser in parsers.items():
        program, command, *arguments = shlex.split(page.EXAMPLES[name])
        assert (program, command) == ('mmdevplug', name)
        parser.parse_args(arguments)


def test_no_chinese_meaning_is_left_over(page):
    used = set()
    for command, parser in page.commands().items():
        for action in page.arguments(parser):
            name = action.option_strings[0] if action.option_strings else action.dest
            meanings = page.TEXTS['zh_cn']['meanings']
            used.add(f'{command} {name}' if f'{command} {name}' in meanings else name)
    assert set(page.TEXTS['zh_cn']['meanings']) <= used


def test_the_package_can_be_run_as_a_module():
    done = run(sys.executable, '-m', 'mmdevplug', '--help')
    assert done.returncode == 0
    assert 'launch-config' in done.stdout
