"""How far results of two devices are apart."""

import torch


def difference(found, expected, least=0.0):
    """The largest difference, relative to the largest finite expected value, or to ``least``.

    Infinite if the shapes differ, or NaN and infinite values are at other places.
    """
    if found.shape != expected.shape:
        return float('inf')
    found, expected = (each.detach().cpu().to(torch.float64) for each in (found, expected))
    finite = torch.isfinite(expected)
    others = [torch.nan_to_num(each[~finite], nan=3.0) for each in (found, expected)]
    if not torch.equal(*others):
        return float('inf')
    if not finite.any():
        return 0.0
    largest = max(expected[finite].abs().max().item(), least)
    apart = (found[finite] - expected[finite]).abs().max().item()
    # NaN where none is expected differs, too.
    return float('inf') if apart != apart else apart / (largest or 1.0)
