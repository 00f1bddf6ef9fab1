"""Find out whether a plan is uneven, and say why and what to do."""

from typing import List, Sequence

from mmdevplug.utils.byte_sizes import format_bytes

from .device_plan import DevicePlan
from .units import Group

#: A device with a smaller part of its share gets nearly nothing.
NEARLY_NOTHING = 0.01
#: The most devices whose loads a message lists.
LISTED = 8


def idle_devices(plan: DevicePlan) -> List[str]:
    """The devices that get nothing or nearly nothing; the host is none of them."""
    if not any(plan.loads.values()):
        return []  # a model without weights
    limits = plan.capacities or {}
    # Both are 0 where the host holds everything; a limit of 0 asks for nothing.
    return [
        name
        for name, ideal in plan.ideals.items()
        if limits.get(name) != 0
        and (plan.loads[name] < NEARLY_NOTHING * ideal or not plan.loads[name])
    ]


def describe_unevenness(
    plan: DevicePlan, groups: Sequence[Group], threshold: float, is_best: bool
) -> str:
    """Say which devices get too much or nearly nothing, why, and the ways out; '' if none does.

    ``groups`` are the parts of the model that are not split; ``is_best`` whether the plan is the
    best split of them, not HF accelerate's map.
    """
    idle = idle_devices(plan)
    if not idle and (len(plan.ideals) < 2 or plan.imbalance <= threshold):
        return ''
    names = list(plan.ideals)
    if len(names) > LISTED:
        names.sort(key=lambda name: -plan.loads[name] / (plan.ideals[name] or 1))
        names[LISTED // 2 : -LISTED // 2] = []
    loads = ', '.join(
        f'{name} {format_bytes(plan.loads[name])}'
        + (f' ({plan.loads[name] / ideal:.1%} of its share)' if ideal else '')
        for name, ideal in ((name, plan.ideals[name]) for name in names)
    )
    empty = [name for name in idle if not plan.loads[name]]
    little = [name for name in idle if plan.loads[name]]
    parts = [
        f'{", ".join(found[:LISTED])} would get {what}'
        for found, what in ((empty, 'nothing'), (little, 'nearly nothing'))
        if found
    ]
    if plan.imbalance > threshold:
        parts.append(f'imbalance {plan.imbalance:.3f} is above balance_threshold={threshold:g}')
    return f'uneven: {" and ".join(parts)}: {loads}. {_reason(plan, groups, is_best)}'


def _reason(plan: DevicePlan, groups: Sequence[Group], is_best: bool) -> str:
    count, total = len(plan.ideals), sum(plan.ideals.values())
    largest = max(groups, key=lambda group: group.bytes)
    shown = f'{largest.label} of {format_bytes(largest.bytes)}'
    if not any(plan.loads[name] for name in plan.ideals):
        return (
            f'Reason: the host holds everything; the largest block is {shown}. Raise max_memory.'
        )
    if not is_best:
        return (
            "The map is HF accelerate's, which fills device after device and counts weights "
            "alone. Take strategy='balanced' or 'dynamic', or fewer devices."
        )
    ways = ['other limits in max_memory'] if plan.capacities else []
    if largest.bytes * count > total:
        reason = (
            f'{shown} stays on one device, and an equal share is {format_bytes(total / count)}'
        )
        most = total // largest.bytes
        fewer = f'at most {most:.0f} devices' if most > 1 else 'one device'
        ways.insert(0, f'{fewer} for this model')
    else:
        reason = (
            f'no split of the {len(groups)} blocks in order is more even; the largest is {shown}'
        )
        ways.insert(0, 'fewer devices')
    return f'Reason: {reason}. Take {", or ".join(ways)}.'
