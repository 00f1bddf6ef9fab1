"""Jobs on the stand-in for a T20, which is the vendor's interface on torch_xla."""

from tests.columns import job_of

#: For :func:`tests.ranks.run_ranks`: eight cards, unless a variable says how many.
T20 = job_of('gcu')


def with_calls(function, *args):
    """Call a function; what it returns, and how often each function of the card was called."""
    result = function(*args)

    import t20_card

    return result, dict(t20_card.calls)
