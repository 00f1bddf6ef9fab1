"""Operators that torch_xla computes otherwise compute what the CPU does, with gradients."""

import functools
import math
from typing import Tuple

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.ranks import in_ranks

pytestmark = pytest.mark.xla

ACTIVATIONS = dict(
    elu=lambda x: functional.elu(x, 0.7),
    selu=lambda x: functional.selu(x),
    celu=lambda x: functional.celu(x, alpha=1.3),
    layers=nn.Sequential(nn.ELU(), nn.CELU(0.5), nn.SELU()),
    elu_in_place=lambda x: nn.ELU(0.9, inplace=True)(x * 1),
    selu_in_place=lambda x: nn.SELU(inplace=True)(x * 1),
    by_position=lambda x: functional.elu(x * 1, 0.4, True),
    where=lambda x: torch.where(x > 1, 2, x),
    method=lambda x: x.where(x > 1, x.new_tensor(2, dtype=torch.float64)),
    amax=lambda x: x.view(-1, 1).amax() + x.amin() + torch.amax(x, 0),
    norm=lambda x: x.norm(math.inf) + torch.norm(x.view(1, -1), p=-math.inf, dim=1),
)
AVERAGES = dict(
    mean=lambda x: x.mean((2, 3)),
    function=lambda x: torch.mean(x, 3, keepdim=True),
    all=lambda x: x.mean(),
    wide=lambda x: x.mean((2, 3), dtype=torch.float32),
    pool=nn.AdaptiveAvgPool2d(1),
    window=nn.AvgPool2d(28),
    resized=lambda x: functional.interpolate(x, scale_factor=0.3, mode='bilinear'),
    norm_of_half=lambda x: nn.BatchNorm2d(3).to(x.device)(x + 2),
    sum=lambda x: x.sum((2, 3)),
    var=lambda x: torch.var(x, dim=(2, 3)) + x.std(),
    l1=lambda x: functional.l1_loss(x, x.detach() * 0),
    mse=lambda x: functional.mse_loss(x, target=x.detach() * 0),
)


def running(norm, x):
    norm.to(x.device)
    for scale in (1, 2):
        norm(x * scale + 5)
    return torch.cat([norm.running_mean, norm.running_var])


IMAGES = dict(
    divisor=lambda x: functional.avg_pool2d(x, 2, divisor_override=3),
    other_divisor=lambda x: functional.avg_pool2d(x, 2, padding=1, divisor_override=7),
    divisor_of_edges=lambda x: functional.avg_pool2d(x, 4, 3, 1, True, False, 5),
    divisor_of_sides=lambda x: functional.avg_pool2d(x, (5, 2), (2, 3), (2, 0), True, True, 3),
    divisor_in_space=lambda x: functional.avg_pool3d(x, (3, 2, 4), 2, 1, True, True, 7),
    shuffle=lambda x: functional.pixel_shuffle(x, 2),
    other_shuffle=nn.PixelShuffle(4),
    norm_of_constant=lambda x: nn.BatchNorm2d(16).to(x.device)(x * 0 + 255),
    norm_far_away=lambda x: nn.BatchNorm2d(16).to(x.device)(x * 1e-2 + 100),
    statistics=lambda x: running(nn.BatchNorm2d(16), x),
    statistics_of_rows=lambda x: running(nn.BatchNorm1d(16, momentum=0.3), x.mean(2)),
    cumulative=lambda x: running(nn.BatchNorm2d(16, momentum=None), x),
    norm_of_rows=lambda x: nn.BatchNorm1d(16).to(x.device)(x.mean((2, 3))),
    **{
        f'{mode} by {factor}': functools.partial(
            lambda x, **options: functional.interpolate(x, **options),
            scale_factor=factor,
            mode=mode,
        )
        for mode in ('nearest', 'nearest-exact', 'bilinear', 'bicubic')
        for factor in (0.5, 1.7, (0.3, 2))
    },
    aligned=lambda x: functional.interpolate(
        x, scale_factor=0.5, mode='bilinear', align_corners=True
    ),
    linear=lambda x: functional.interpolate(x.mean(2), scale_factor=0.4, mode='linear'),
    volume=lambda x: functional.interpolate(x[:, None, :4], scale_factor=0.7, mode='trilinear'),
)
MASKS = dict(
    cumsum=lambda x: (x > 1).cumsum(0) * 0.5,
    count=lambda x: torch.count_nonzero(x > 1, 0) + (x > 1).count_nonzero(),
    small=lambda x: (x.abs().to(torch.uint8) * 100).cumsum(0),
    where=lambda x: torch.where(x > 1, 1, 0.5),
    integers=lambda x: torch.where(x > 1, x.long(), 0.5),
    clamp=lambda x: x.long().clamp(0.5, 2.5),
    clip=lambda x: torch.clip(x.long(), min=-0.5),
    bounds=lambda x: x.long().clamp(1, 2),
    arange=lambda x: torch.arange(0, 1, 0.1, device=x.device),
    short_arange=lambda x: torch.arange(0.1, 0.4, 0.1, device=x.device),
    whole_arange=lambda x: torch.arange(7, device=x.device),
)


def written(make):
    """What a tensor holds after its copy, or its view, was written to."""

    def write(x):
        x = x.detach().clone()
        made = make(x)
        made += 1.0
        return x + made.sum()

    return write


COPIES = dict(
    expanded=written(lambda x: x[0].expand(4, -1).contiguous()),
    turned=written(lambda x: x.t().contiguous()),
    turned_twice=written(lambda x: x.t().t().contiguous()),
    row=written(lambda x: x[1].contiguous()),
    column=written(lambda x: x[:, 1].contiguous()),
    detached=written(lambda x: x.detach()[:, 1:].contiguous()),
    flattened=written(lambda x: x.t().flatten()),
    flat_rows=written(lambda x: x[1:].flatten()),
    reshaped=written(lambda x: torch.reshape(x.t(), (2, -1))),
    split=written(lambda x: x.view(2, -1, 3).permute(1, 0, 2).reshape(-1, 6)),
    viewed=written(lambda x: x.view(-1).reshape(3, -1)),
    like=written(lambda x: x.t().reshape_as(x)),
    detached_after=written(lambda x: x.t().detach().contiguous()),
    heads=written(lambda x: (x.view(2, 3, 3) @ x[:3]).view(2, 3, 3).transpose(1, 2).reshape(2, 9)),
    product=written(lambda x: (x.view(2, 3, 3) @ x[:3]).flatten()),
    column_of_copy=written(lambda x: x.t().contiguous()[0].reshape(2, 3)),
)


def scripted():
    """TorchScript finds operators that were replaced."""

    def choose(x: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        loss = functional.cross_entropy(functional.elu(x).view(1, -1), torch.zeros(1).long())
        return torch.where(x > 1, torch.clamp(x, 0.0, 2.0), torch.mean(x)), loss

    return torch.jit.script(choose)(torch.arange(4.0))


@in_ranks()
def test_operators_compute_what_the_host_computes():
    import mmdevplug

    mmdevplug.init_device('none', 'xla')
    mmdevplug.patch_mmengine('xla')
    torch.manual_seed(0)
    values, image = torch.linspace(-3, 3, 41), torch.rand(2, 3, 56, 56) + 0.5
    odd = torch.rand(2, 16, 33, 21)
    found = {}
    for device in ('cpu', 'xla'):
        for kind, functions, given in (
            ('', ACTIVATIONS, values),
            ('bfloat16 ', AVERAGES, image.bfloat16()),
            ('image ', IMAGES, odd),
            ('mask ', MASKS, values),
            ('copy ', COPIES, torch.arange(18.0).view(6, 3)),
        ):
            for name, function in functions.items():
                x = given.detach().to(device).requires_grad_()
                result = function(x)
                pair = [result.detach().cpu()]
                if result.requires_grad:
                    result.float().pow(2).sum().backward()
                    pair.append(x.grad.cpu())
                found.setdefault(kind + name, []).append(pair)
    chosen, loss = scripted()
    assert len(found) == len([*ACTIVATIONS, *AVERAGES, *IMAGES, *MASKS, *COPIES])
    wrong = []
    for name, (host, there) in found.items():
        close = dict(rtol=0.01, atol=1e-4) if 'bfloat16' in name else dict(rtol=1e-5, atol=2e-5)
        if 'norm_' in name:  # which amplifies rounding
            close = dict(rtol=1e-2, atol=0.06 if 'bfloat16' in name else 1e-2)
        assert len(host) == len(there), name
        for one, other in zip(host, there):
            try:
                assert one.dtype == other.dtype
                torch.testing.assert_close(other, one, **close)
            except AssertionError as error:
                wrong.append(f'{name}: {error}')
    assert not wrong, '\n'.join(wrong)
    assert chosen.tolist() == [1.5, 1.5, 2.0, 2.0]
    assert loss.item() == pytest.approx(math.log(sum(map(math.exp, range(4)))))


LAYERS = dict(
    linear=(lambda: nn.Linear(8, 6), (4, 32, 64, 8)),
    vector=(lambda: nn.Linear(8, 6), (8,)),
    conv1d=(lambda: nn.Conv1d(8, 6, 3), (4, 8, 2048)),
    conv2d=(lambda: nn.Conv2d(8, 6, 3), (4, 8, 64, 64)),
    conv2d_alone=(lambda: nn.Conv2d(8, 6, 3), (8, 64, 64)),
    conv3d=(lambda: nn.Conv3d(8, 6, 1), (2, 8, 8, 32, 32)),
    transposed=(lambda: nn.ConvTranspose2d(8, 6, 2, 2), (4, 8, 32, 32)),
    attention=(lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), (2, 1024, 8)),
)


@pytest.mark.parametrize('half', [False, True])
@in_ranks()
def test_gradients_of_biases_are_added_up_in_float32(half):
    """Gradients of the parameters of layers in half precision, by layer and device."""
    import mmdevplug

    mmdevplug.init_device('none', 'xla')
    mmdevplug.patch_mmengine('xla')
    found = {}
    for name, (make, shape) in LAYERS.items():
        for device, precise in (('cpu', True), ('xla', False)):
            torch.manual_seed(0)
            layer, x = make().to(device), (torch.rand(shape) - 0.3).to(device)
            if half and not precise:
                layer, x = layer.bfloat16(), x.bfloat16()
            with torch.autocast(device, dtype=torch.bfloat16, enabled=not precise and not half):
                out = layer(x)
            weights = torch.linspace(0.5, 1.5, out.numel()).view(out.shape).to(device)
            (out.float() * weights.roll(7)).sum().backward()
            gradients = {key: p.grad.float().cpu() for key, p in layer.named_parameters()}
            kinds = {str(p.grad.dtype) for p in layer.parameters()}
            found.setdefault(name, []).append((gradients, kinds))
    assert len(found) == len(LAYERS)
    wrong = []
    for name, ((expected, _), (gradients, kinds)) in found.items():
        assert kinds == {'torch.bfloat16' if half else 'torch.float32'}
        for key, one in gradients.items():
            off = float((one - expected[key]).abs().max() / expected[key].abs().max())
            rounds = half and name == 'attention'  # whose normalization is in half precision, too
            if key.endswith('bias') and 'norm' not in key and not rounds and off > 0.06:
                wrong.append(f'{name}.{key}: {off:.2f}')
    assert not wrong


@pytest.mark.parametrize('reduction', ['mean', 'sum', 'none'])
@pytest.mark.parametrize('label', [3, -1, 255])
@in_ranks()
def test_a_label_that_is_no_class_is_nan(reduction, label):
    import mmdevplug

    mmdevplug.init_device('none', 'xla')
    mmdevplug.patch_mmengine('xla')
    scores = torch.randn(2, 3, 4, device='xla', requires_grad=True)
    labels = torch.zeros(2, 4, dtype=torch.long)
    labels[0, 0] = label
    for loss in (nn.CrossEntropyLoss, nn.NLLLoss):
        found = loss(reduction=reduction)(scores, labels.to('xla'))
        (gradient,) = torch.autograd.grad(found.sum(), scores)
        assert found.isnan().sum().item() == 1
        assert gradient[0, :, 0].isnan().all().item()
        assert gradient.isnan().any(1).sum().item() == (1 if reduction == 'none' else 8)
        kept = loss(reduction=reduction, ignore_index=label)(scores, labels.to('xla'))
        expected = loss(reduction=reduction, ignore_index=label)(scores.cpu(), labels)
        torch.testing.assert_close(kept.cpu(), expected)


@in_ranks()
def test_an_index_that_a_table_does_not_have_is_nan():
    import mmdevplug

    mmdevplug.init_device('none', 'xla')
    mmdevplug.patch_mmengine('xla')
    table = nn.Embedding(3, 2, padding_idx=0).to('xla')
    found = table(torch.tensor([[0, 2], [3, -1]], device='xla')).cpu()
    assert found.isnan().all(-1).tolist() == [[False, False], [True, True]]
    assert found[0, 1].equal(table.weight[2].cpu())
