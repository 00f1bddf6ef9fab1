"""The page of options: it is what the dataclasses say, in both languages."""

import importlib
import re
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / 'docs'


@pytest.fixture
def page(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    yield importlib.import_module('options_page')
    for module in ('options_page', 'options_needed', 'tables'):
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
            for column in (3, 4):
                assert values_in(one[column]) == values_in(other[column]), one[0]
            described.append(one[0].strip('`'))
    assert sorted(described) == sorted(chinese['meanings']) == sorted(page.NEEDED)


def test_who_needs_an_option_is_a_sentence_in_both_languages(page):
    for name, (english, chinese) in page.NEEDED.items():
        assert re.fullmatch(r'[A-Z][^\u4e00-\u9fff]{20,}\.', english), name
        assert re.fullmatch(r'.*[\u4e00-\u9fff].*。', chinese), name


def values_in(meaning):
    return sorted(re.findall(r'`[^`]+`|\d+|[A-Z]{3,}\d?', meaning))
