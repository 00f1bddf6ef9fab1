"""In place of the vendor's extension: modes of running, and types of ``torch.distributed``."""

import os
from enum import Enum

from t20_card import card
from torch.distributed import PrefixStore, ProcessGroup, ReduceOp, Store, TCPStore  # noqa: F401

# No ProcessGroupECCL: on real installs it is missing, too, where Enflame's collectives are.

VERSION = '2.5.136'


class JitRunMode(Enum):
    """How a graph runs: waiting for it, not waiting, or waiting for the graph before."""

    SYNC = 0
    ASYNC = 1
    SAFEASYNC = 2


visible = os.environ.get('TOPS_VISIBLE_DEVICES')
card.set_count(len(visible.split(',')) if visible else 8)
card.set_lose_weights(os.environ.get('T20_CARD_LOSE_WEIGHTS') == '1')
card.set_narrow(os.environ.get('T20_CARD_NARROW') == '1')
