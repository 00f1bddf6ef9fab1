"""The plan as a table, a picture and a page."""

import re
from html.parser import HTMLParser

import pytest
from torch import nn

from mmdevplug.model_parallel import plan
from mmdevplug.model_parallel.draw_plan import save_html, save_png
from tests.model_parallel.models import make


@pytest.fixture(scope='module')
def made():
    return plan(make('llama'), 'xla:0-2', max_memory={0: '1MB', 1: '1MB', 2: '2MB'})


def test_table(made):
    text = str(made)
    for name in made.devices:
        assert name in text
    assert f'imbalance {made.imbalance:.3f}' in text
    assert 'model.embed_tokens' in text
    assert made.steps[-1] in text


def test_picture(made, tmp_path):
    from matplotlib.image import imread

    path = tmp_path / 'plan.png'
    save_png(made, path)
    picture = imread(path)
    colours = {tuple(pixel) for row in picture[::4] for pixel in (row[::4, :3] * 255).astype(int)}
    assert (0x8F, 0xB8, 0xDE) in colours  # the class that holds most
    assert list(tmp_path.iterdir()) == [path]


class Page(HTMLParser):
    """The text of a page, and whatever would be loaded."""

    def __init__(self):
        super().__init__()
        self.text, self.loaded = '', []

    def handle_starttag(self, tag, attributes):
        self.loaded += [value for key, value in attributes if key in ('src', 'href')]

    def handle_data(self, data):
        self.text += data


def test_page(made, tmp_path):
    path = tmp_path / 'plan.html'
    save_html(made, path)
    text = path.read_text()
    page = Page()
    page.feed(text)
    rows = re.findall(r'^│ (\S+) +│ \S+ +│ [^│]+ │ (xla:\d) +│$', page.text, re.M)
    assert rows == [(block.name, block.device) for block in made.blocks]
    assert page.loaded == []
    assert not re.search(r'https?://|<script|@import|url\(', text)
    assert "default-src 'none'" in text
    # A bar for each device, as long as its load.
    longest = max(made.loads.values())
    for device in made.devices:
        bar = next(line for line in page.text.splitlines() if line.startswith(device))
        assert len(bar) - 8 == pytest.approx(100 * made.loads[device] / longest, abs=1)
    for kind in {block.kind for block in made.blocks}:
        assert f' {kind} ' in page.text


def test_hostile_names():
    evil = type('<script>alert(1)</script>', (nn.Linear,), {})
    model = nn.ModuleDict({'<b>one</b>': evil(4, 4), 'two': nn.Linear(4, 4)})
    from mmdevplug.model_parallel.draw_plan import render

    text = render(plan(model, 'xla:0-1'))
    assert '<script' not in text
    assert '<b>one' not in text
