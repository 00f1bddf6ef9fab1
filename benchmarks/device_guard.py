"""What DeviceGuard costs a training step on which it finds nothing.

python benchmarks/device_guard.py [--rounds 25]

Steps with and without the guard take turns in one process with one thread, and the table gives
medians over rounds, of CPU time, which other programs disturb less than they do the clock.
Operations are of a size that one trains with: the price of the guard is a fixed time for each, so
smaller ones pay more, and the last row shows how much. `bare` is a TorchFunctionMode that does
nothing.
"""

import argparse
import statistics
import time
from contextlib import nullcontext
from typing import Any, Callable, Dict

import torch
import torch.nn.functional as F
from result_file import write_results
from torch import nn
from torch.overrides import TorchFunctionMode

from mmdevplug.device_guard import DeviceGuard


def convolution(channels: int) -> nn.Sequential:
    """Two convolutions with batch normalization, halving the image."""
    return nn.Sequential(
        nn.Conv2d(channels, 2 * channels, 3, 2, 1, bias=False),
        nn.BatchNorm2d(2 * channels),
        nn.ReLU(inplace=True),
        nn.Conv2d(2 * channels, 2 * channels, 3, 1, 1, bias=False),
        nn.BatchNorm2d(2 * channels),
        nn.ReLU(inplace=True),
    )


def training_step(
    model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor
) -> Callable[[], None]:
    """Forward, loss, backward, clipping and AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def step() -> None:
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


class Transformer(nn.Module):
    """Encoder layers over embedded tokens, and a classifier of their mean."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(tokens)).mean(1))


def steps() -> Dict[str, Callable[[], None]]:
    """The steps to measure, by name."""
    cnn = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1),
        *(convolution(16 * 2**i) for i in range(3)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 10),
    )
    labels = torch.randint(10, (16,))
    return {
        'CNN, 16 images of 128x128': training_step(cnn, torch.randn(16, 3, 128, 128), labels),
        'transformer, 8 x 128 tokens, width 256': training_step(
            Transformer(256, 4), torch.randint(1000, (8, 128)), labels[:8]
        ),
        'toy transformer, 2 x 8 tokens, width 32': training_step(
            Transformer(32, 2), torch.randint(1000, (2, 8)), labels[:2]
        ),
    }


class Bare(TorchFunctionMode):
    """What PyTorch itself takes for a mode."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **kwargs) if kwargs else func(*args)


class Count(Bare):
    """How many operations come by."""

    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.calls += 1
        return super().__torch_function__(func, types, args, kwargs)


def milliseconds(step: Callable[[], None], repeats: int, around: Any) -> float:
    """Milliseconds of CPU for each of ``repeats`` steps."""
    with around:
        start = time.thread_time()
        for _ in range(repeats):
            step()
        return (time.thread_time() - start) / repeats * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--rounds', type=int, default=25)
    parser.add_argument('--json', help='write the figures to this file')
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # Backward, too, then runs in the thread whose time is taken.
    print(f'torch {torch.__version__}, ms a step, medians of {args.rounds}')
    print(f'{"":40}{"calls":>7}{"without":>9}{"bare":>9}{"guard":>9}{"more":>8}')
    found = []
    for name, step in steps().items():
        counted = Count()
        with counted:
            step()
        repeats = 10 if name.startswith('toy') else 1
        ways = (nullcontext, Bare, DeviceGuard)
        rounds = [[milliseconds(step, repeats, way()) for way in ways] for _ in range(args.rounds)]
        plain, bare, guarded = (statistics.median(column) for column in zip(*rounds))
        print(
            f'{name:40}{counted.calls:7}{plain:9.2f}{bare:9.2f}{guarded:9.2f}'
            f'{guarded / plain - 1:8.1%}'
        )
        ms = dict(without=plain, bare=bare, guard=guarded)
        found.append(dict(name=name, calls=counted.calls, ms=ms, slower=[guarded / plain - 1]))
    if args.json:
        write_results(args.json, found)


if __name__ == '__main__':
    main()
