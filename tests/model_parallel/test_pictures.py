"""The plan as a table and a picture."""

import pytest

from mmdevplug.model_parallel import plan
from mmdevplug.model_parallel.draw_plan import save_png
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
