"""Log what averaging gradients costs, and draw it at the end."""

import time
from dataclasses import astuple
from pathlib import Path
from typing import Dict, List, Optional

from mmengine.dist import get_world_size, is_main_process
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from mmdevplug.distributed.byte_exchange import gather_json
from mmdevplug.distributed.slow_rank import Slowest, find_slowest, gather_times
from mmdevplug.distributed.traffic import TRAFFIC, Cost
from mmdevplug.utils.annotations import AnyRunner

#: The figures of each iteration: milliseconds and megabytes.
KEPT = ('iteration', 'hidden', 'waited', 'sent', 'shared')
MOST_POINTS = 4096


class History:
    """Figures of many iterations in little memory: neighbours are averaged when there are many."""

    def __init__(self) -> None:
        self.every = 1  # number of iterations that a point is the average of
        self.count = 0
        self.points: Dict[str, List[float]] = {name: [] for name in KEPT}  # oldest first
        self.totals = dict.fromkeys(KEPT, 0.0)
        self._pending: List[Dict[str, float]] = []

    def append(self, figures: Dict[str, float]) -> None:
        """Add the figures of an iteration."""
        self.count += 1
        for name in KEPT:
            self.totals[name] += figures[name]
        self._pending.append(figures)
        if len(self._pending) < self.every:
            return
        for name, values in self.points.items():
            values.append(sum(each[name] for each in self._pending) / self.every)
        self._pending = []
        if len(self.points['sent']) >= MOST_POINTS:
            self.every *= 2
            for name, values in self.points.items():
                self.points[name] = [(a + b) / 2 for a, b in zip(values[::2], values[1::2])]

    def means(self) -> Dict[str, float]:
        """The average of an iteration."""
        return {name: total / max(1, self.count) for name, total in self.totals.items()}


@HOOKS.register_module()
class CommunicationHook(Hook):
    """Log bytes, time and overlap of the communication of each training iteration.

    The scalars are ``comm/mb`` (MB that this rank sent, or exchanged in memory shared with other
    ranks of its host), ``comm/ms`` (milliseconds from the start of the first message to the end of
    the last) and ``comm/overlap`` (the part of that time in which this rank went on computing or
    copying, 0 to 1). They are in the log line, the JSON log and the other backends of the
    visualizer. Every ``compare_every`` iterations the ranks compare how long they waited:
    ``comm/slowest_ms`` is by how many milliseconds of each iteration the slowest rank delays the
    others, and a warning names a rank that delays them by a fifth of it. At the end of training
    the log has a table of all ranks, and ``communication.png`` lies beside it. A vendor's backend
    (nccl, hccl, ...) does not report how long its messages take: then there are only bytes and the
    time of an iteration.

    Args:
        picture (bool): Whether to draw. Defaults to True.
        compare_every (int): 0 for never. Defaults to 100.
    """

    priority = 'NORMAL'

    def __init__(self, picture: bool = True, compare_every: int = 100) -> None:
        self.picture = picture
        self.compare_every = compare_every
        self.history = History()
        #: Since ranks were compared.
        self._recent = History()
        self._warned_of: Optional[int] = None
        self._last: Optional[float] = None

    def before_train(self, runner: AnyRunner) -> None:
        """Discard the traffic before training, e.g. the initial weights."""
        TRAFFIC.take()
        self._last = time.perf_counter()

    def after_train_iter(self, runner: AnyRunner, *args: object, **kwargs: object) -> None:
        """Log the communication of the iteration."""
        now = time.perf_counter()
        kinds = [astuple(cost) for cost in TRAFFIC.take().values()]
        cost = Cost(*map(sum, zip(*kinds)))
        if not cost.messages and not self.history.count:
            return  # this job's communication cannot be seen from here
        scalars = {'train/comm/mb': (cost.sent + cost.shared) / 2**20}
        if cost.seconds:
            scalars['train/comm/ms'] = cost.seconds * 1e3
            scalars['train/comm/overlap'] = cost.overlap
        runner.message_hub.update_scalars(scalars)
        waited = min(cost.waited, cost.seconds) * 1e3
        figures = dict(
            iteration=(now - (self._last or now)) * 1e3,
            hidden=cost.seconds * 1e3 - waited,
            waited=waited,
            sent=cost.sent / 2**20,
            shared=cost.shared / 2**20,
        )
        self._last = now
        self.history.append(figures)
        if self.history.count > 1:  # the first one connects and compiles
            self._recent.append(figures)
        if self.compare_every and self._recent.count == self.compare_every:
            self._compare(runner)
            self._recent = History()

    def _compare(self, runner: AnyRunner) -> None:
        """Find the slowest rank since the last time; all ranks take part."""
        means = self._recent.means()
        loading = runner.message_hub.log_scalars.get('train/data_time')
        ranks = gather_times(
            means['iteration'],
            means['waited'],
            1e3 * float(loading.mean(self.compare_every)) if loading is not None else 0.0,
        )
        if not _is_timed(ranks):
            self.compare_every = 0  # on all ranks, which have the same figures
            return
        slowest = find_slowest(ranks)
        runner.message_hub.update_scalar('train/comm/slowest_ms', slowest.delay)
        self._warn(runner, slowest)

    def _warn(self, runner: AnyRunner, slowest: Slowest) -> None:
        """Name a slow rank once, and again after another one or none was slow."""
        if slowest.slow and slowest.rank != self._warned_of:
            runner.logger.warning(f'Last {self.compare_every} iterations: {slowest.text}')
        self._warned_of = slowest.rank if slowest.slow else None

    def after_train(self, runner: AnyRunner) -> None:
        """Log the table of all ranks and draw; all ranks take part."""
        if get_world_size() == 1:
            return
        ranks = gather_json(dict(self.history.means(), count=self.history.count))
        if not is_main_process() or not ranks[0]['count']:
            return
        runner.logger.info(_table(ranks))
        if self.picture:
            path = Path(runner.log_dir) / 'communication.png'
            draw(self.history, ranks, path)
            runner.logger.info(f'Communication drawn in {path}')


def _is_timed(ranks: List[Dict[str, float]]) -> bool:
    """Whether any message was seen from its start to its end."""
    return any(rank.get('hidden', 0) + rank['waited'] > 0 for rank in ranks)


def _overlap(figures: Dict[str, float]) -> float:
    total = figures['hidden'] + figures['waited']
    return figures['hidden'] / total if total else 0.0


def _table(ranks: List[Dict[str, float]]) -> str:
    """A line for each rank; of many ranks the first, and those that waited least and most."""
    lines = [f'Communication, mean of {ranks[0]["count"]} iterations:']
    timed = _is_timed(ranks)
    heads = ('iteration ms', 'comm ms', 'waited ms', 'MB sent', 'MB shared')
    lines.append('  rank' + ''.join(f'{head:>14}' for head in heads))
    order = sorted(range(len(ranks)), key=lambda rank: ranks[rank]['waited'])
    shown = range(len(ranks)) if len(ranks) <= 16 else sorted({0, *order[:4], *order[-4:]})
    for rank in shown:
        found = ranks[rank]
        times = [found['hidden'] + found['waited'], found['waited']]
        shown_times = [f'{each:14.1f}' if timed else f'{"-":>14}' for each in times]
        lines.append(
            f'{rank:6}{found["iteration"]:14.1f}{"".join(shown_times)}'
            f'{found["sent"]:14.2f}{found["shared"]:14.2f}'
        )
    if not timed:
        lines.append(
            'The backend does not report how long its messages take: measure it with '
            "custom_hooks=[dict(type='ProfilerHook')]."
        )
        return '\n'.join(lines)
    lines.append(f'Overlap on rank 0: {_overlap(ranks[0]):.0%}.')
    least, median = order[0], order[len(order) // 2]
    if 2 * ranks[least]['waited'] < ranks[median]['waited']:
        lines.append(f'Rank {least} waited least by far: it is the one that the others wait for.')
    return '\n'.join(lines)


def draw(history: History, ranks: List[Dict[str, float]], path: Path) -> None:
    """Draw time and bytes of each iteration on rank 0, and the waiting of each rank, as PNG."""
    # Not pyplot, which keeps state and picks a window system.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(11, 7))
    FigureCanvasAgg(figure)
    # Fixed margins: finding them takes as long as drawing.
    margins = dict(left=0.07, right=0.98, bottom=0.08, top=0.95, wspace=0.16, hspace=0.2)
    time_axes, wait_axes, sent_axes, text_axes = figure.subplots(
        2, 2, gridspec_kw=dict(width_ratios=[3, 1], height_ratios=[2, 1], **margins)
    ).flat
    points, means = history.points, history.means()
    x = [(index + 1) * history.every for index in range(len(points['sent']))]
    time_axes.plot(x, points['iteration'], color='0.4', linewidth=1, label='whole iteration')
    time_axes.stackplot(
        x,
        points['waited'],
        points['hidden'],
        labels=['communication waited for', 'communication hidden'],
        colors=['#d1495b', '#8fb8de'],
    )
    # The first iterations compile and connect, and would flatten all others.
    highest = sorted(points['iteration'])[int(0.98 * (len(x) - 1))] if x else 1.0
    time_axes.set(ylabel='ms', title='Rank 0', ylim=(0, 1.3 * max(highest, 1e-3)))
    time_axes.legend(loc='upper right', fontsize=8)
    for name, color in (('sent', '#30638e'), ('shared', '#edae49')):
        sent_axes.plot(x, points[name], color=color, label=name)
    sent_axes.set(xlabel='iteration', ylabel='MB', ylim=(0, None))
    sent_axes.legend(loc='upper right', fontsize=8)
    wait_axes.barh(range(len(ranks)), [rank['waited'] for rank in ranks], color='#d1495b')
    wait_axes.set(xlabel='ms waited', ylabel='rank', title='All ranks')
    wait_axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    wait_axes.invert_yaxis()
    text_axes.axis('off')
    timed = _is_timed(ranks)
    lines = [f'{name}: {means[name]:.1f} ms' for name in (KEPT[:3] if timed else KEPT[:1])]
    lines += [f'{name}: {means[name]:.2f} MB' for name in KEPT[3:]]
    lines += [f'overlap: {_overlap(means):.0%}'] if timed else []
    text_axes.text(0, 1, 'Mean, rank 0\n' + '\n'.join(lines), va='top', family='monospace')
    figure.savefig(str(path), dpi=100)
