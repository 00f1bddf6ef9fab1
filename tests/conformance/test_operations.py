"""Compare operations and their gradients with the CPU's, on the samples of PyTorch's own tests."""

from contextlib import suppress

import pytest
import torch

from mmdevplug.utils.pytree import replace_parts, tensors_in
from mmdevplug.utils.torch_compat import import_version_module
from tests.conformance.card import PRODUCT_TOLERANCE, TOLERANCE, missing_kernel
from tests.difference import difference

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
#: The order of equal values is left to the device: indices are not compared.
WITH_INDICES = {'topk', 'sort', 'nn.functional.max_pool2d'}
#: Samples that are left out on lazy devices, besides those of zero size and without dimensions:
#: torch_xla 2.9 computes them wrongly, refuses them, or ends the process (SIGSEGV, SIGFPE).
#: Models of OpenMMLab do without, or get a gradient of ours (frozen batch normalization).
NOT_ON_LAZY = {
    'amax': lambda sample: 'dim' not in sample.kwargs,
    'amin': lambda sample: 'dim' not in sample.kwargs,
    'repeat': lambda sample: 0 in sample.args[0],
    'nn.functional.avg_pool2d': lambda sample: any(sample.args[5:]),  # divisor_override
    'nn.functional.batch_norm': lambda sample: not sample.kwargs.get('training'),
    'nn.functional.cross_entropy': lambda sample: sample.input.dim() < 2,
    'nn.functional.interpolate': lambda s: s.kwargs.get('recompute_scale_factor') is False,
    'nn.functional.nll_loss': lambda sample: sample.input.dim() < 2,
}
#: Of an operation, taken from the beginning to the end of PyTorch's list.
SAMPLES = 4


def compare_operations(card, names=(*OPERATIONS, *PRODUCTS)):
    """What is wrong and what is missing, of the samples of every operation."""
    known = _samples_of_pytorch()
    wrong, missing, count = {}, {}, 0
    for name in [name for name in names if name in known]:
        print(f'{name} on {card.device}', flush=True)  # the last line names what ends the process
        try:
            samples = list(_computed(known[name], card.accelerator.compilation.lazy))
            worst = max([_apart(card, known[name], *sample) for sample in samples], default=0.0)
        except Exception as error:
            # A vendor's library may raise anything.
            kernel = missing_kernel(str(error))
            (missing if kernel else wrong)[name] = kernel or f'{type(error).__name__}: {error}'
            continue
        count += len(samples)
        if not worst <= (PRODUCT_TOLERANCE if name in PRODUCTS else TOLERANCE):
            wrong[name] = f'differs by {worst:.2g}'
    return wrong, missing, count


def test_operations(asked):
    """Operations and their gradients are those of the CPU."""
    ((wrong, missing, count),) = asked.run(compare_operations)
    assert not wrong
    if missing:
        pytest.skip(f'no kernel for {missing}; all others are right')
    assert count > 200


def _apart(card, info, sample, expected):
    found = card.fetch(_compute(info, sample, card.device))
    if len(found) != len(expected):
        return float('inf')
    # A gradient may be nothing but rounding errors of larger values.
    sizes = [each.double().abs().max().item() for each in expected if each.numel()]
    least = 0.1 * max((size for size in sizes if size < float('inf')), default=0.0)
    return max((difference(a, b, least) for a, b in zip(found, expected)), default=0.0)


def _samples_of_pytorch():
    import_version_module()
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    except ImportError as error:
        pytest.skip(f"samples of PyTorch's own tests: {error}. pip install expecttest")
    # Of several variants the first is the plain one.
    return {info.name: info for info in reversed(op_db)}


def _computed(info, lazy):
    """Some samples of an operation that the CPU takes, with its results."""
    cpu = torch.device('cpu')
    torch.manual_seed(0)
    samples = [
        sample
        for sample in info.sample_inputs(
            'cpu', torch.float32, requires_grad=info.supports_autograd
        )
        if not sample.kwargs.get('dropout_p') and not (lazy and _is_left_out(info.name, sample))
    ]
    step = max(1, len(samples) // SAMPLES)
    for sample in samples[::step][:SAMPLES]:
        # Some samples are for other devices.
        with suppress(RuntimeError):
            yield sample, _compute(info, sample, cpu)


def _is_left_out(name, sample):
    plain = all(each.numel() and each.dim() for each in tensors_in(sample.input))
    return not plain or bool(NOT_ON_LAZY.get(name, lambda _: False)(sample))


def _compute(info, sample, device):
    """The results of an operation, and the gradients of its inputs."""

    def move(tensor):
        moved = tensor.detach().to(device, copy=True)
        return moved.requires_grad_() if tensor.requires_grad else moved

    given, args, kwargs = replace_parts((sample.input, sample.args, sample.kwargs), move)
    outputs = tensors_in(info.op(given, *args, **kwargs))
    if info.name in WITH_INDICES:
        outputs = outputs[:1]
    inputs = [each for each in tensors_in([given, *args, kwargs]) if each.requires_grad]
    smooth = [each for each in outputs if each.requires_grad and each.numel()]
    if not inputs or not smooth:
        return outputs
    # Weights that differ, so that a gradient at another place shows.
    total = sum((each.to(torch.float32) * _weights(each)).sum() for each in smooth)
    gradients = torch.autograd.grad(total, inputs, allow_unused=True)
    return [*outputs, *(each for each in gradients if each is not None)]


def _weights(like):
    numbers = torch.arange(like.numel(), device='cpu', dtype=torch.float32)
    return (torch.cos(numbers) + 1.5).reshape(like.shape).to(like.device)
