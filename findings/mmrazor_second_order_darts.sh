#!/usr/bin/env bash
# mmrazor 1.0.0 with torch 1.13.1 (PyTorch 2 cannot import it): Darts(unroll=True) computes no second-order term.
# It is zero for every batch: the gradients above and below are taken as `param.grad`, one tensor into which both
# backward passes add, and their difference is taken of it and itself. The virtual step assigns to a local name, so
# weights do not change, and its gradient stays in the sum: the architecture gets a gradient 1.5 times too large.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.10}" -m venv "$folder/env"
"$folder/env/bin/pip" install -q "setuptools<81" wheel
"$folder/env/bin/pip" install -q torch==1.13.1 "numpy<2" mmengine==0.10.7 mmcv-lite==2.1.0 mmrazor==1.0.0 "opencv-python<4.12" joblib scikit-learn
cat >"$folder/show.py" <<'P'
import sys
from unittest import mock

import mmrazor
import torch
from torch import nn

sys.modules['mmcv.ops'] = mock.MagicMock()  # mmcv-lite has none, and the search uses none
from mmengine.model import BaseModel
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmrazor.models import Darts, DiffMutableOP, NasMutator
from mmrazor.registry import MODELS


@MODELS.register_module()
class Scaled(nn.Module):
    def __init__(self, module_kwargs=None, **kwargs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return x * self.weight


class Supernet(BaseModel):
    def __init__(self):
        super().__init__()
        self.choice = DiffMutableOP(dict(one=dict(type='Scaled'), other=dict(type='Scaled')))
        self.head = nn.Linear(4, 1)

    def forward(self, inputs, data_samples=None, mode='loss'):
        return dict(loss=(self.head(self.choice(inputs)) - data_samples).square().mean())


torch.manual_seed(0)
model = Darts(Supernet(), mutator=NasMutator(), unroll=True)
arch = list(model.mutator.parameters())
optims = OptimWrapperDict(
    architecture=OptimWrapper(torch.optim.SGD(model.architecture.parameters(), lr=0.1, momentum=0.9)),
    mutator=OptimWrapper(torch.optim.SGD(arch, lr=0.1)),
)
train, val = ([dict(inputs=torch.randn(8, 4), data_samples=torch.randn(8, 1)) for _ in range(2)])
weights, (alpha,) = list(model.architecture.parameters()), list(model.mutator.parameters())
LR = 0.1


def gradients(data, *of):
    return torch.autograd.grad(model(**data)['loss'], of)


def by_hand():
    """DARTS, equations 7 and 8: the gradient at the weights after one step, less LR times the second-order term."""
    before = [weight.detach().clone() for weight in weights]

    def at(direction, step):
        with torch.no_grad():
            for weight, old, each in zip(weights, before, direction):
                weight.copy_(old + step * each)

    at(gradients(train, *weights), -LR)
    first, *direction = gradients(val, alpha, *weights)
    eps = 0.01 / torch.cat([each.flatten() for each in direction]).norm()
    at(direction, eps)
    (above,) = gradients(train, alpha)
    at(direction, -eps)
    (below,) = gradients(train, alpha)
    at(direction, 0)
    second = (above - below) / (2 * eps)
    return second, first - LR * second


second, expected = by_hand()
theirs = []
compute = model._compute_hessian
model._compute_hessian = lambda *args: theirs.append(compute(*args)) or theirs[0]
model._unrolled_backward(val, train, optims)
print('mmrazor', mmrazor.__version__, 'torch', torch.__version__)
print('second-order term: by hand', second.tolist(), 'mmrazor', theirs[0][0].tolist())
print('gradient of the architecture: by hand', expected.tolist(), 'mmrazor', alpha.grad.tolist())
(given,) = theirs[0]
sys.exit(not (second.abs().max() > 1e-3 and given.abs().max() == 0 and (alpha.grad - expected).abs().max() > 1e-3))
P
OMP_NUM_THREADS=1 "$folder/env/bin/python" -W ignore "$folder/show.py"
