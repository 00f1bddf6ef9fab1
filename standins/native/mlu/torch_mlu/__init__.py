"""Named and shaped like Cambricon's package, for tests: see native_card."""

import sys

import native_card
import torch

__version__ = '0.0.0+standin'

mlu = native_card.install(native_card.MLU)
torch.distributed.is_cncl_available = lambda: True
sys.modules['torch.mlu'] = sys.modules['torch_mlu.mlu'] = mlu
sys.modules['torch.mlu.amp'] = sys.modules['torch_mlu.mlu.amp'] = mlu.amp
