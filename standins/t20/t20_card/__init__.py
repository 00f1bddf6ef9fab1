"""A lazy card of eight devices, ``xla:0 ... xla:7``, and its account for tests.

``torch_gcu`` beside it is the vendor's interface to this card. On PyTorch 1.10 it is an extension
that counts what a lazy card would run; on later releases it is torch_xla, which does run lazily.
"""

from collections import Counter

import torch

#: How often each function of ``torch_gcu`` was called.
calls = Counter()

#: How often a graph was run in each `JitRunMode`, also where nothing was pending.
modes = Counter()

#: The seeds that were given to all cards, in order.
seeds = []

if torch.__version__.startswith('1.10.'):
    from .torch110 import card
else:
    from .on_torch_xla import card

__all__ = ['calls', 'card', 'modes', 'seeds']
