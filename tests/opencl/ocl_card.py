"""Functions that pytorch_ocl leaves out of ``torch.ocl``, and that PyTorch itself calls.

Without ``is_available``, Adam and AdamW of torch 2.13 raise AttributeError in their first step.
"""

import torch


def complete():
    """Add them; a config names this function as ``accelerator.register``."""
    torch.ocl.is_available = staticmethod(lambda: True)
    torch.ocl.device_count = staticmethod(lambda: 1)
    torch.ocl.current_device = staticmethod(lambda: 0)
    torch.ocl.set_device = staticmethod(lambda device: None)
