"""Measure how evenly bytes are spread over devices."""

from typing import List, Sequence


def ideal_loads(loads: Sequence[float], weights: Sequence[float]) -> List[float]:
    """The loads of a perfect split: in proportion to the weights of the devices."""
    total, share = sum(loads), sum(weights)
    return [total * weight / share if share else 0.0 for weight in weights]


def imbalance(loads: Sequence[float], weights: Sequence[float]) -> float:
    """The largest ``|load - ideal| / ideal``; empty devices of weight 0 are passed over."""
    worst = 0.0
    for load, ideal in zip(loads, ideal_loads(loads, weights)):
        if ideal:
            worst = max(worst, abs(load - ideal) / ideal)
        elif load:
            worst = float('inf')
    return worst


def balance_score(values: Sequence[float]) -> float:
    """``1 / (1 + variance)``; 1 is perfect."""
    mean = sum(values) / len(values)
    return 1.0 / (1.0 + sum((value - mean) ** 2 for value in values) / len(values))


def byte_balance_score(loads: Sequence[float], weights: Sequence[float]) -> float:
    """The same of ``load / ideal``, so that it does not depend on the unit or the model's size."""
    pairs = list(zip(loads, ideal_loads(loads, weights)))
    return balance_score([load / ideal for load, ideal in pairs if ideal] or [0.0])
