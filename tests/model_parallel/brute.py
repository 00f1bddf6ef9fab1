"""All contiguous splits of a short sequence, one by one, in exact arithmetic."""

from fractions import Fraction
from itertools import combinations_with_replacement


def every_split(count, parts, allow_empty):
    """The ends of the parts, for every split."""
    for cuts in combinations_with_replacement(range(count + 1), parts - 1):
        marks = [0, *cuts, count]
        if allow_empty or all(b > a for a, b in zip(marks, marks[1:])):
            yield marks[1:]


def score(sizes, weights, costs, ends):
    """What a split is judged by: largest load over weight, empty devices, imbalance, what the
    smallest load lacks of 0.7 of the ideal, its cuts."""
    marks = [0, *ends]
    loads = [sum(sizes[a:b]) for a, b in zip(marks, marks[1:])]
    ideal = Fraction(sum(sizes), sum(weights))
    ratios = [Fraction(load, weight) for load, weight in zip(loads, weights)]
    imbalance = max(abs(ratio - ideal) for ratio in ratios) / ideal
    cuts = {end for end in ends[:-1] if 0 < end < len(sizes)}
    lacking = max(Fraction(0), Fraction(7, 10) * ideal - min(ratios))
    return max(ratios), loads.count(0), imbalance, lacking, sum(costs[cut] for cut in cuts)


def best_score(sizes, weights, limits, costs, allow_empty):
    """The best of all splits within the limits, None if there is none."""
    found = []
    for ends in every_split(len(sizes), len(weights), allow_empty):
        marks = [0, *ends]
        loads = [sum(sizes[a:b]) for a, b in zip(marks, marks[1:])]
        if all(load <= limit for load, limit in zip(loads, limits)):
            found.append(score(sizes, weights, costs, ends))
    return min(found, default=None)
