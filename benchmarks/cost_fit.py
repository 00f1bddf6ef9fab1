"""The cost model of gloo's all-reduce, its fit and what it predicts.

For N ranks and a message of S bytes, with the time in seconds::

    T = max(core, link)
    core = (a * 2 (N - 1)  +  b * 2 S (N - 1) / N) * k  +  c
    link = d * 2 S (N - 1) / N

A ring passes 2 (N - 1) messages one after the other, and every rank sends 2 S (N - 1) / N bytes;
P. Patarasuk, X. Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations, JPDC
2009. The core of a rank spends ``a`` on a message whatever its size, ``b`` on a byte and ``c`` on
an all-reduce. ``k`` is max(1, N / cores): where more ranks than cores share a machine, they wait
for a core. A link with a limit takes ``d`` for a byte, while the cores work on: gloo cuts messages
into parts, so that the longer of the two decides. Loopback has no limit of its own.
"""

import itertools
from typing import Callable, Dict, List, NamedTuple, Sequence

import numpy

LOOPBACK = 'loopback'
#: More passes than points could change sides in.
PASSES = 50


class Point(NamedTuple):
    """A measured all-reduce.

    Attributes:
        link (str): ``'loopback'``, or the rate of a limited link.
        ranks (int): N.
        size (int): S in bytes.
        seconds (float): T.
        crowding (float): k.
    """

    link: str
    ranks: int
    size: int
    seconds: float
    crowding: float


class Model(NamedTuple):
    """The fitted terms in seconds.

    Attributes:
        latency (float): a.
        byte (float): b.
        constant (float): c.
        links (Dict[str, float]): For each limited link its d.
    """

    latency: float
    byte: float
    constant: float
    links: Dict[str, float]

    def core(self, point: Point) -> float:
        return float(numpy.dot(_columns(point), self[:3]))

    def link(self, point: Point) -> float:
        return self.links.get(point.link, 0.0) * ring_bytes(point.size, point.ranks)

    def predict(self, point: Point) -> float:
        """The time of an all-reduce; ``point.seconds`` is not looked at."""
        return max(self.core(point), self.link(point))


def ring_bytes(size: float, ranks: int) -> float:
    """Bytes that a rank sends: 2 S (N - 1) / N."""
    return 2.0 * size * (ranks - 1) / ranks


def ring_messages(ranks: int) -> int:
    """Messages that follow each other: 2 (N - 1)."""
    return 2 * (ranks - 1)


def _columns(point: Point) -> List[float]:
    messages, bytes_ = ring_messages(point.ranks), ring_bytes(point.size, point.ranks)
    return [messages * point.crowding, bytes_ * point.crowding, 1.0]


def fit(points: Sequence[Point], nominal: Dict[str, float]) -> Model:
    """Fit the model to points of all links.

    Which of core and link decides is taken from the fit so far, the terms of each side are fitted
    to its points, and so on until no point changes sides.

    Args:
        points (Sequence[Point]): Loopback among them.
        nominal (Dict[str, float]): For each limited link the d that its rate amounts to, to begin
            with.
    """
    model = Model(*fit_sum([point for point in points if point.link == LOOPBACK]), nominal)
    sides = None
    for _ in range(PASSES):
        now = [model.core(point) >= model.link(point) for point in points]
        if now == sides:
            break
        sides = now
        core = [point for point, by_core in zip(points, sides) if by_core]
        links = {
            link: _fit_link(
                [p for p, by_core in zip(points, sides) if p.link == link and not by_core]
            )
            or byte
            for link, byte in model.links.items()
        }
        model = Model(*fit_sum(core), links)
    return model


def _fit_link(points: Sequence[Point]) -> float:
    """The d of points that the link decides; 0 if there are none."""
    ratios = numpy.array([ring_bytes(p.size, p.ranks) / p.seconds for p in points])
    return float(ratios.sum() / (ratios**2).sum()) if len(ratios) else 0.0


def fit_sum(points: Sequence[Point]) -> List[float]:
    """Fit a, b and c, non-negative, so that the sum of squared relative errors is least.

    Three terms have seven subsets; among the least-squares solutions that are non-negative, the
    best is the non-negative least-squares solution.
    """
    seconds = numpy.array([point.seconds for point in points])
    matrix = numpy.array([_columns(point) for point in points]) / seconds[:, None]
    best, least = numpy.zeros(3), float('inf')
    for count in (1, 2, 3):
        for subset in itertools.combinations(range(3), count):
            chosen = matrix[:, list(subset)]
            # Columns of very different sizes are scaled to one before they are solved.
            scale = numpy.abs(chosen).max(axis=0)
            found = numpy.linalg.lstsq(chosen / scale, numpy.ones(len(points)), rcond=None)[0]
            if (found < 0).any():
                continue
            error = float(((chosen / scale @ found - 1) ** 2).sum())
            if error < least:
                least, best = error, numpy.zeros(3)
                best[list(subset)] = found / scale
    return [float(term) for term in best]


def errors_by_link(
    predict: Callable[[Point], float], points: Sequence[Point]
) -> Dict[str, Dict[str, float]]:
    """Median and largest |predicted - measured| / measured for each link."""
    errors: Dict[str, List[float]] = {}
    for point in points:
        error = abs(predict(point) - point.seconds) / point.seconds
        errors.setdefault(point.link, []).append(error)
    return {
        link: dict(median=float(numpy.median(found)), max=float(numpy.max(found)))
        for link, found in errors.items()
    }


def held_out_errors(
    points: Sequence[Point], nominal: Dict[str, float], held_out: Callable[[Point], bool]
) -> Dict[str, Dict[str, float]]:
    """Fit the points that are not held out, and tell how well that predicts the others."""
    model = fit([point for point in points if not held_out(point)], nominal)
    return errors_by_link(model.predict, [point for point in points if held_out(point)])


def textbook_errors(points: Sequence[Point]) -> Dict[str, Dict[str, float]]:
    """The errors of a 2 (N - 1) + b 2 S (N - 1) / N + c, fitted to each link apart."""
    errors = {}
    for link in {point.link: None for point in points}:
        plain = [p._replace(crowding=1.0) for p in points if p.link == link]
        model = Model(*fit_sum(plain), {})
        errors.update(errors_by_link(model.predict, plain))
    return errors


class Cluster(NamedTuple):
    """What predictions are made for.

    Attributes:
        latency (float): a in seconds, with a core for each rank.
        constant (float): c in seconds.
        link_byte (float): Seconds that a byte takes on a host's link.
        core_byte (float): Seconds that a byte takes a rank's core.
        ranks_per_host (int): R.
        bucket_bytes (int): Gradients in a message.
    """

    latency: float
    constant: float
    link_byte: float
    core_byte: float
    ranks_per_host: int
    bucket_bytes: int

    def bucket_latency(self, ranks: int) -> float:
        """Seconds that a bucket takes whatever its size."""
        return ring_messages(ranks) * self.latency + self.constant

    def waiting(self, size: float, ranks: int) -> float:
        """Seconds that all buckets of ``size`` bytes take whatever their sizes."""
        return max(1, -(-int(size) // self.bucket_bytes)) * self.bucket_latency(ranks)

    def flat(self, size: float, hosts: int) -> float:
        """Seconds to average ``size`` bytes in one ring of all ranks."""
        ranks = hosts * self.ranks_per_host
        # One connection of the ring leaves each host.
        bytes_ = ring_bytes(size, ranks)
        return max(self.waiting(size, ranks) + bytes_ * self.core_byte, bytes_ * self.link_byte)

    def hierarchical(self, size: float, hosts: int, compression: float = 1.0) -> float:
        """Seconds to average first within hosts, in shared memory, then between them.

        Each rank takes a share of ``size`` and has a ring of its own with its counterparts on the
        other hosts; the rings share the link. Adding up within hosts is left out.
        """
        bytes_ = ring_bytes(size, hosts) * compression
        core = self.waiting(size, hosts) + bytes_ * self.core_byte / self.ranks_per_host
        return max(core, bytes_ * self.link_byte)


def connections_of_rank(ranks: int) -> int:
    """Of a full mesh: one to every other rank."""
    return ranks - 1


def connections_of_all(ranks: int) -> int:
    """Of a full mesh."""
    return ranks * (ranks - 1) // 2
