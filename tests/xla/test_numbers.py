"""What the page of numbers says of torch_xla, for a sample of the operators."""

import json

import pytest

from docs.numbers import configs, operators
from tests.jobs import ROOT

pytestmark = pytest.mark.xla

#: Some that differ, some that mmdevplug replaces, some that every model calls.
SAMPLE = [
    'add',
    'mul',
    'matmul',
    'sum',
    'mean',
    'softmax',
    'where',
    'clamp',
    'amax',
    'cumsum',
    'topk',
    'kthvalue',
    'cummax',
    'baddbmm',
    'linalg.inv_ex',
    'nn.functional.elu',
    'nn.functional.celu',
    'nn.functional.selu',
    'nn.functional.gelu',
    'nn.functional.avg_pool2d',
    'nn.functional.avg_pool3d',
    'nn.functional.pixel_shuffle',
    'nn.functional.conv2d',
    'nn.functional.layer_norm',
    'nn.functional.interpolate',
]


def test_a_sample_differs_where_the_page_says(tmp_path):
    file = tmp_path / 'found.json'
    found = operators.main(
        ['--accelerator', 'xla', '--jobs', '1', '--json', str(file), '--operators', *SAMPLE]
    )
    assert json.loads(file.read_text()) == found
    assert found['operators'] > 20
    known = json.loads((ROOT / 'docs' / 'numbers' / 'xla.json').read_text())
    expected = [
        row
        for row in known['different']
        if any(f'{row["operator"]}.'.startswith(f'{name}.') for name in SAMPLE)
    ]
    assert found['different'] == expected
    assert any(row['operator'] == 'kthvalue' for row in expected)


def test_what_the_product_does_not_replace_differs(tmp_path):
    found = operators.main(
        ['--accelerator', 'xla', '--jobs', '1', '--plain', '--operators', 'nn.functional.elu']
    )
    assert [row['what'] for row in found['different']] == [['gradient: values']] * 2


def test_a_released_config_is_equal_where_the_page_says():
    name = 'mmpretrain::lenet/lenet5_mnist'
    found = configs.main(['--accelerator', 'xla', '--configs', name])
    known = json.loads((ROOT / 'docs' / 'numbers' / 'configs_xla.json').read_text())
    assert found['rows'][name] == known['rows'][name]
    assert found['rows'][name]['now']['equal']
