"""The notebook of the demo: its cells run one after the other, as in Jupyter."""

import json
import sys

import pytest

from tests.commands import environment, run
from tests.jobs import ROOT

NOTEBOOK = ROOT / 'demo' / 'digits.ipynb'
#: Runs cells, and prints what the last ones hold.
RUN = """
import json, sys
cells = json.load(open(sys.argv[1], encoding='utf-8'))['cells']
names = dict(__name__='__main__')
for cell in cells:
    if cell['cell_type'] == 'code':
        exec(''.join(cell['source']), names)
right = sum(digit == item['labels'] for digit, item in zip(names['predicted'], names['items']))
print('ACCURACY', names['accuracy'], 'RIGHT', right, 'OF', len(names['predicted']))
"""


def test_it_holds_no_output():
    notebook = json.loads(NOTEBOOK.read_text(encoding='utf-8'))
    assert notebook['nbformat'] == 4
    code = [cell for cell in notebook['cells'] if cell['cell_type'] == 'code']
    assert len(code) >= 5
    assert [cell['outputs'] for cell in code] == [[]] * len(code)


@pytest.mark.long
def test_its_cells_train_and_predict(tmp_path):
    (tmp_path / 'configs').symlink_to(ROOT / 'configs')
    (tmp_path / 'demo').mkdir()  # where Jupyter opens it
    env = environment(MPLBACKEND='Agg')
    done = run(sys.executable, '-c', RUN, NOTEBOOK, cwd=tmp_path / 'demo', env=env)
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()[-1].split()
    assert float(words[1]) > 95
    assert int(words[3]) > 35
    assert words[5] == '40'
