"""Report on a run of configs/digits: validation accuracy, a picture of training and predictions.

    mmdevplug train configs/digits/digits_cpu.py --nproc 2 --work-dir work_dirs/demo
    python demo/digits_report.py work_dirs/demo

The accuracy is computed afresh from the newest checkpoint. The picture is WORK_DIR/digits.png.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from mmengine.config import Config
from mmengine.registry import MODELS

from mmdevplug.checkpoint.reading import read_checkpoint
from mmdevplug.errors import DevPlugError
from mmdevplug.examples.digits import DigitsDataset

matplotlib.use('Agg')
from matplotlib import pyplot as plt  # noqa: E402  after the choice of Agg

ROWS, COLUMNS = 5, 8
LOSS, ACCURACY, WRONG, RIGHT, GRID = '#1f6fb4', '#d9822b', '#c62828', '#444444', '#e3e3e3'


class Curve(NamedTuple):
    """Values over training iterations."""

    iterations: List[int]
    values: List[float]


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('work_dir', type=Path, help='the --work-dir of the training run')
    return parser.parse_args()


COMMAND = 'mmdevplug train configs/digits/digits_cpu.py --nproc 2'


def how_to_train(work_dir: Path) -> str:
    """The command that makes what is missing."""
    return f'Train first: {COMMAND} --work-dir {work_dir}'


def newest(work_dir: Path, pattern: str, what: str) -> Path:
    """Find the newest file that matches.

    Args:
        work_dir (Path): Where to look.
        pattern (str): For ``Path.glob``.
        what (str): What the file is, for the message.

    Returns:
        Path: The file.

    Raises:
        DevPlugError: If there is none.
    """
    found = sorted(work_dir.glob(pattern), key=lambda path: path.stat().st_mtime)
    if not found:
        raise DevPlugError(f'{work_dir} holds no {what} ({pattern}). {how_to_train(work_dir)}')
    return found[-1]


def read_curves(work_dir: Path) -> Tuple[Curve, Curve]:
    """Read what the newest training run logged.

    Args:
        work_dir (Path): The work dir of MMEngine's runner, with a folder for each run.

    Returns:
        Tuple[Curve, Curve]: The training loss and the validation accuracy in percent.

    Raises:
        DevPlugError: If no run logged a loss.
    """
    # Names of runs are times, so their order is that of the runs.
    for run in sorted(filter(Path.is_dir, work_dir.iterdir()), reverse=True):
        for path in (
            run / 'vis_data' / 'scalars.json',
            run / 'vis_data' / f'{run.name}.json',
            run / f'{run.name}.json',
        ):
            if path.is_file():
                loss, accuracy = curves_of(path)
                if loss.values:
                    return loss, accuracy
    raise DevPlugError(
        f'no run in {work_dir} logged a loss (RUN/vis_data/scalars.json). {how_to_train(work_dir)}'
    )


def curves_of(path: Path) -> Tuple[Curve, Curve]:
    """Read one file of scalars, a JSON object in each line."""
    loss, accuracy = Curve([], []), Curve([], [])
    iteration = 0
    for line in path.read_text(encoding='utf-8').splitlines():
        scalars: Dict[str, Any] = json.loads(line)
        if 'loss' in scalars:
            iteration = scalars['iter']
            loss.iterations.append(iteration)
            loss.values.append(scalars['loss'])
        elif 'accuracy' in scalars:
            # Validation counts epochs, so it is put where training had got to.
            accuracy.iterations.append(iteration)
            accuracy.values.append(scalars['accuracy'])
    return loss, accuracy


def predict(work_dir: Path) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Classify the test images with the newest checkpoint.

    Args:
        work_dir (Path): Holds the checkpoint, and the config that the runner dumped.

    Returns:
        Tuple[np.ndarray, np.ndarray, np.ndarray]: Images of shape (N, 8, 8), the digits that they
        show, and the predicted ones.
    """
    cfg = Config.fromfile(str(newest(work_dir, '*.py', 'config')))
    checkpoint = read_checkpoint(str(newest(work_dir, '*.pth', 'checkpoint')))
    model = MODELS.build(cfg.model)
    model.load_state_dict(checkpoint['state_dict'])
    model.eval()
    dataset = DigitsDataset(split='test')
    items = [dataset[index] for index in range(len(dataset))]
    images = np.stack([item['inputs'] for item in items])
    with torch.no_grad():
        predicted = model(torch.from_numpy(images), mode='tensor').argmax(dim=1).numpy()
    return images[:, 0], np.array([item['labels'] for item in items]), predicted


def draw(
    path: Path,
    curves: Tuple[Curve, Curve],
    images: np.ndarray,
    labels: np.ndarray,
    predicted: np.ndarray,
) -> None:
    """Draw the curves and a grid of images.

    Args:
        path (Path): The file to write.
        curves (Tuple[Curve, Curve]): See :func:`read_curves`.
        images (np.ndarray): Images of shape (N, 8, 8).
        labels (np.ndarray): The digits that they show.
        predicted (np.ndarray): The predicted digits.
    """
    figure = plt.figure(figsize=(13, 5.2), dpi=120)
    left, right = figure.add_gridspec(
        1, 2, width_ratios=(1, 1.15), left=0.055, right=0.985, top=0.84, bottom=0.11, wspace=0.2
    )
    accuracy = 100.0 * float(np.mean(predicted == labels))
    figure.suptitle(
        f'Digits: validation accuracy {accuracy:.1f} %', x=0.055, y=0.985, ha='left', fontsize=15
    )
    draw_curves(figure.add_subplot(left), *curves)

    wrong = np.flatnonzero(predicted != labels)
    shown = [*wrong, *np.flatnonzero(predicted == labels)][: ROWS * COLUMNS]
    grid = right.subgridspec(ROWS, COLUMNS, hspace=0.45, wspace=0.12)
    axes = [figure.add_subplot(cell) for cell in grid]
    draw_images(axes, shown, images, labels, predicted)
    heading = f'Predictions on {len(labels)} test images, the {len(wrong)} wrong ones first'
    figure.text(right.get_position(figure).x0, 0.895, heading, fontsize=11)
    figure.savefig(path)
    plt.close(figure)


def draw_curves(axes: Axes, loss: Curve, accuracy: Curve) -> None:
    """Draw the loss, and the accuracy on an axis of its own."""
    axes.set_title('Training', loc='left', fontsize=11, pad=20)
    axes.plot(*loss, color=LOSS, linewidth=2, marker='o', markersize=3.5)
    axes.set_yscale('log')
    axes.set_xlabel('iteration')
    axes.set_ylabel('training loss', color=LOSS)
    axes.tick_params(axis='y', which='both', colors=LOSS)
    axes.grid(color=GRID, linewidth=0.8)
    axes.spines['top'].set_visible(False)
    if not accuracy.values:
        axes.spines['right'].set_visible(False)
        return
    beside = axes.twinx()
    beside.plot(*accuracy, color=ACCURACY, linewidth=2, marker='s', markersize=5)
    beside.set_ylabel('validation accuracy, %', color=ACCURACY)
    beside.tick_params(axis='y', colors=ACCURACY)
    beside.set_ylim(min(90.0, min(accuracy.values) - 2.0), 100.5)
    beside.spines['top'].set_visible(False)


def draw_images(
    cells: Sequence[Axes],
    shown: Sequence[int],
    images: np.ndarray,
    labels: np.ndarray,
    predicted: np.ndarray,
) -> None:
    """Draw one image in each cell, with its prediction above it."""
    for axes in cells:
        axes.set_xticks([])
        axes.set_yticks([])
    for axes, index in zip(cells, shown):
        right = predicted[index] == labels[index]
        color = RIGHT if right else WRONG
        title = f'{predicted[index]}' if right else f'{predicted[index]} (is {labels[index]})'
        axes.imshow(images[index], cmap='gray_r')
        axes.set_title(title, color=color, fontsize=10, pad=3)
        for spine in axes.spines.values():
            spine.set_color(GRID if right else WRONG)
            spine.set_linewidth(1.0 if right else 1.8)


def main() -> int:
    """Report; an error that a user can mend ends it with one message."""
    work_dir = parse_args().work_dir
    try:
        if not work_dir.is_dir():
            raise DevPlugError(f'{work_dir} is no folder. {how_to_train(work_dir)}')
        curves = read_curves(work_dir)
        images, labels, predicted = predict(work_dir)
    except DevPlugError as error:
        print(f'digits_report: {error}', file=sys.stderr)
        return 1
    picture = work_dir / 'digits.png'
    draw(picture, curves, images, labels, predicted)
    print(f'validation accuracy: {100.0 * np.mean(predicted == labels):.1f} %')
    print(f'wrote {picture}; the log is {max(work_dir.glob("*/*.log"))}')
    print(
        f'To go on: source .venv/bin/activate && {COMMAND} --work-dir {work_dir} --resume '
        f'--cfg-options train_cfg.max_epochs=24'
    )
    return 0


if __name__ == '__main__':
    sys.exit(main())
