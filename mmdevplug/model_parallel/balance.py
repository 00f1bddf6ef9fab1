"""Measure how even a distribution is."""

from typing import Sequence


def ideal_loads(loads: Sequence[float], weights: Sequence[float]) -> Sequence[float]:
    """The loads of a perfect split: in proportion to the weights of the devices."""
    total, share = sum(loads), sum(weights)
    return [total * weight / share if share else 0.0 for weight in weights]


def imbalance(loads: Sequence[float], weights: Sequence[float]) -> float:
    """The largest ``|load - ideal| / ideal`` over devices; 0 is perfect.

    Args:
        loads (Sequence[float]): One for each device, of any unit.
        weights (Sequence[float]): What the devices hold in proportion; all 1 if equal. Devices
            with weight 0 are passed over if they are empty.
    """
    worst = 0.0
    for load, ideal in zip(loads, ideal_loads(loads, weights)):
        if ideal:
            worst = max(worst, abs(load - ideal) / ideal)
        elif load:
            worst = float('inf')
    return worst


def variance(values: Sequence[float]) -> float:
    """The population variance."""
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / len(values)


def balance_score(counts: Sequence[int]) -> float:
    """``1 / (1 + variance)`` of the numbers of components; 1 is perfect."""
    return 1.0 / (1.0 + variance(counts))


def byte_balance_score(loads: Sequence[float], weights: Sequence[float]) -> float:
    """The same of ``load / ideal``, so that it does not depend on the unit or the model's size."""
    pairs = list(zip(loads, ideal_loads(loads, weights)))
    return 1.0 / (1.0 + variance([load / ideal for load, ideal in pairs if ideal] or [0.0]))
