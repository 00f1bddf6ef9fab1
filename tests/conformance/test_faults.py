"""The tests of this folder see the fault of a card."""

import pytest

from tests.conformance.card import Asked
from tests.conformance.test_card import copy_everything, draw_numbers
from tests.conformance.test_collectives import compare
from tests.conformance.test_operations import compare_operations
from tests.needs_card import needs_card
from tests.ranks import RanksFailed

BROKEN = "custom_imports = dict(imports=['broken_card'])\naccelerator = 'zeta'\n"
#: Of operations.
NAMES = ['add', 'nn.functional.silu']

pytestmark = needs_card


def run(folder, fault, check, *args, **options):
    path = folder / 'broken.py'
    path.write_text(BROKEN)
    return Asked('zeta', str(path)).run(check, *args, environ=dict(BROKEN=fault), **options)


def test_a_wrong_operation(tmp_path):
    ((wrong, missing, _),) = run(tmp_path, 'operation', compare_operations, NAMES)
    assert list(wrong) == ['nn.functional.silu']
    assert not missing


def test_a_wrong_gradient(tmp_path):
    for wrong in run(tmp_path, 'gradients', compare, ranks=2):
        assert {each.split(' of ')[0] for each in wrong} == {'gradient averaging'}


@pytest.mark.parametrize(
    ('fault', 'words', 'check'),
    [
        ('strides', 'torch.float32, transposed, sent and fetched: differs by', [copy_everything]),
        ('generator', 'draw(), expected', [draw_numbers]),
        ('abort', 'the process died', [compare_operations, NAMES]),
    ],
)
def test_a_fault_is_named(tmp_path, fault, words, check):
    with pytest.raises(RanksFailed) as failed:
        run(tmp_path, fault, *check)
    assert words in str(failed.value)
