"""The page of messages: it has every message of ours, and none that nothing says."""

import importlib.util
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / 'docs'


def _load(name):
    spec = importlib.util.spec_from_file_location(name, DOCS / f'{name}.py')
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# In this order: each imports the one before it.
_, _, messages = [_load(name) for name in ('tables', 'options_page', 'messages')]
pages = _load('troubleshooting_pages')
TOPICS = pages.load()
OURS = [says for t in TOPICS if not t.get('foreign') for e in t['entries'] for says in e['says']]


def test_every_message_has_an_entry():
    found = list(messages.messages())
    missing = [one for one in found if not any(pages.is_in(says, one.text) for says in OURS)]
    told = '\n'.join(f'{one.place} {one.kind}: {one.text}' for one in missing)
    assert not missing, f'docs/troubleshooting has no entry for\n{told}'


def test_no_entry_fits_every_message():
    assert not [says for says in OURS if sum(map(str.isalpha, says)) <= len('expected')]


def test_every_entry_is_a_message():
    said = messages.all_texts()
    unsaid = [one for one in OURS if not any(pages.is_in(one, text) for text in said)]
    assert not unsaid


@pytest.mark.parametrize('language', ['en', 'zh_cn'])
def test_the_page_is_made_of_the_entries(language):
    page = DOCS / language / 'troubleshooting.md'
    assert page.read_text(encoding='utf-8') == pages.render(TOPICS, language), (
        'run python docs/troubleshooting_pages.py'
    )


def test_both_languages_say_why_and_what_to_do():
    for topic in TOPICS:
        assert set(topic['title']) == {'en', 'zh_cn'}
        for entry in topic['entries']:
            for language in ('en', 'zh_cn'):
                why, what = entry[language]
                assert why.endswith(('.', '。')), entry['says']
                assert what.endswith(('.', '。')), entry['says']


def test_the_twenty_most_likely_come_first():
    ranked = [e for topic in TOPICS for e in topic['entries'] if 'likely' in e]
    assert sorted(e['likely'] for e in ranked) == list(range(1, 21))
    page = pages.render(TOPICS, 'en')
    first = page.split('\n## ')[1]
    for entry in ranked:
        assert page.count('\n' + '\n'.join(entry['says']) + '\n') == 1
        assert entry['says'][0] in first
