"""The page of options: it is what the dataclasses say, in both languages."""

import importlib
import re
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / 'docs'


@pytest.fixture
def page(monkeypatch):
    """The script that writes the pages."""
    monkeypatch.syspath_prepend(str(DOCS))
    yield importlib.import_module('options_page')
    for module in ('options_page', 'tables'):
        sys.modules.pop(module, None)


@pytest.mark.parametrize('language', ['en', 'zh_cn'])
def test_the_page_is_made_of_the_dataclasses(page, language):
    written = (DOCS / language / 'options.md').read_text(encoding='utf-8')
    made = '\n\n'.join(page.render(page.TEXTS[language])) + '\n'
    assert written == made, 'run python docs/options_page.py'


def test_meanings_name_the_same_values_in_both_languages(page):
    english, chinese = page.TEXTS['en'], page.TEXTS['zh_cn']
    described = []
    for key in page.kinds():
        for one, other in zip(page.rows(key, english), page.rows(key, chinese)):
            assert values_in(one[-1]) == values_in(other[-1]), one[0]
            described.append(one[0].strip('`'))
    assert sorted(described) == sorted(chinese['meanings'])


def values_in(meaning):
    """Code and numbers."""
    return sorted(re.findall(r'`[^`]+`|\d+|[A-Z]{3,}\d?', meaning))
