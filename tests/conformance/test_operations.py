"""Compare operations and their gradients with the CPU's, on the samples of PyTorch's own tests."""

import json

import pytest

from docs.numbers import operators
from mmdevplug import init_device, patch_mmengine
from mmdevplug.utils.torch_compat import import_version_module
from tests.conformance.card import PRODUCT_TOLERANCE, TOLERANCE, missing_kernel
from tests.jobs import ROOT

#: What models of OpenMMLab and transformers train with, by their names in ``op_db``.
_NAMES = """
    add sub mul div pow sqrt rsqrt exp log abs neg sin sigmoid tanh erf clamp maximum minimum where
    sum mean amax amin argmax std var cumsum prod norm topk sort gather scatter scatter_add
    index_select index_put masked_fill masked_select cat stack split chunk permute transpose
    reshape expand repeat flip roll tril triu eq gt isfinite nonzero
    nn.functional.relu nn.functional.gelu nn.functional.silu nn.functional.leaky_relu
    nn.functional.hardswish nn.functional.softplus softmax log_softmax nn.functional.pad
    nn.functional.batch_norm nn.functional.layer_norm nn.functional.group_norm
    nn.functional.max_pool2d nn.functional.avg_pool2d nn.functional.adaptive_avg_pool2d
    nn.functional.interpolate nn.functional.grid_sample nn.functional.unfold
    nn.functional.embedding nn.functional.one_hot nn.functional.cross_entropy
    nn.functional.nll_loss nn.functional.mse_loss nn.functional.smooth_l1_loss
    nn.functional.binary_cross_entropy_with_logits nn.functional.normalize
"""
_PRODUCTS = """
    matmul mm bmm addmm einsum nn.functional.linear nn.functional.conv1d nn.functional.conv2d
    nn.functional.conv_transpose2d nn.functional.scaled_dot_product_attention
"""
OPERATIONS, PRODUCTS = _NAMES.split(), _PRODUCTS.split()
#: Of an operation: those of the page of numbers.
SAMPLES = 3
#: What the page of numbers says of an operator that must not be called.
ENDS = 'ends the process'


def compare_operations(card, names=(*OPERATIONS, *PRODUCTS)):
    """What is wrong and what is missing, of the samples of every operation, and their number."""
    init_device('none', card.options.device)
    patch_mmengine()
    known = _operators_of_pytorch()
    told, raise_errors = _told_by_the_page(card.accelerator.name)
    wrong, missing, count = {}, {}, 0
    for name in [name for name in names if name in known]:
        if ENDS in told.get(name, ()):
            continue
        print(f'{name} on {card.device}', flush=True)  # the last line names what ends the process
        loose = PRODUCT_TOLERANCE / TOLERANCE if name in PRODUCTS else 1
        found = operators.compare(known[name], 'float32', card.device, SAMPLES, loose)
        kernel = missing_kernel(found.get('error', ''))
        if kernel:
            missing[name] = kernel
        elif found['raised'] and name not in raise_errors:
            wrong[name] = found['error']
        elif found['differ'] and name not in told:
            wrong[name] = found['what']
        count += found['samples']
    return wrong, missing, count


def test_operations(asked):
    """Operations and their gradients are those of the CPU."""
    ((wrong, missing, count),) = asked.run(compare_operations)
    assert not wrong
    if missing:
        pytest.skip(f'no kernel for {missing}; all others are right')
    assert count > 200


def _operators_of_pytorch():
    import_version_module()
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    except ImportError as error:
        pytest.skip(f"samples of PyTorch's own tests: {error}. pip install expecttest")
    # Of several variants the first is the plain one.
    return {info.name: info for info in reversed(op_db)}


def _told_by_the_page(accelerator):
    """The operators that differ, and those that raise errors, as the page of numbers says."""
    path = ROOT / 'docs' / 'numbers' / f'{accelerator}.json'
    page = json.loads(path.read_text()) if path.exists() else {}
    different = [row for row in page.get('different', ()) if row['dtype'] == 'float32']
    return {row['operator']: row['what'] for row in different}, page.get('raised', ())
