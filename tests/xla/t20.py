"""Running functions on the stand-in for a T20, which is the vendor's interface on torch_xla."""

import sys

from tests.jobs import ROOT

STANDIN = str(ROOT / 'standins' / 't20')


def on_t20(function, *args):
    """Call a function in a process that finds the vendor's package."""
    sys.path.insert(0, STANDIN)
    return function(*args)


def with_calls(function, *args):
    """The same; what it returns, and how often each function of the card was called."""
    result = on_t20(function, *args)

    import t20_card

    return result, dict(t20_card.calls)
