"""The plan as a table, a picture and a page."""

import re
from html.parser import HTMLParser

import pytest
from torch import nn

from mmdevplug.model_parallel import plan
from mmdevplug.model_parallel.drawing import save_png
from mmdevplug.model_parallel.page import save_html
from tests.model_parallel.models import make


@pytest.fixture(scope='module')
def made():
    return plan(make('llama'), 'xla:0-2', max_memory={0: '1MB', 1: '1MB', 2: '2MB'})


def test_table(made):
    told = str(made)
    for name in made.devices:
        assert name in told
    assert f'imbalance {made.imbalance:.3f}' in told
    assert 'model.embed_tokens' in told
    assert made.steps[-1] in told


def test_picture(made, tmp_path):
    from matplotlib.image import imread

    path = tmp_path / 'plan.png'
    save_png(made, path)
    picture = imread(path)
    colours = {tuple(pixel) for row in picture[::4] for pixel in (row[::4, :3] * 255).astype(int)}
    assert (0x8F, 0xB8, 0xDE) in colours  # the class that holds most
    assert list(tmp_path.iterdir()) == [path]


class Bars(HTMLParser):
    """The blocks of each bar, and whatever would be loaded."""

    def __init__(self):
        super().__init__()
        self.bars, self.loaded = [], []

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if found.get('class') == 'bar':
            self.bars.append([])
        if tag == 'i' and 'title' in found:
            self.bars[-1].append(found['title'].split(' ')[0])
        self.loaded += [value for key, value in found.items() if key in ('src', 'href')]


def test_page(made, tmp_path):
    path = tmp_path / 'plan.html'
    save_html(made, path)
    text = path.read_text()
    page = Bars()
    page.feed(text)
    expected = [[b.name for b in made.blocks if b.device == d] for d in made.devices]
    assert page.bars == expected
    assert page.loaded == []
    assert not re.search(r'https?://|<script|@import|url\(', text)
    assert "default-src 'none'" in text


def test_hostile_names():
    evil = type('<script>alert(1)</script>', (nn.Linear,), {})
    model = nn.ModuleDict({'<b>one</b>': evil(4, 4), 'two': nn.Linear(4, 4)})
    from mmdevplug.model_parallel.page import render

    text = render(plan(model, 'xla:0-1'))
    assert '<script' not in text
    assert '<b>one' not in text
