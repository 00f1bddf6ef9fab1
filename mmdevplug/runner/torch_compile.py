"""Let ``torch.compile`` trace the model alone."""

import torch

#: What makes collectives, checks and copies, and no graph worth compiling.
UNTRACED = (
    'accelerators',
    'distributed',
    'fault_tolerance',
    'gradients',
    'hooks',
    'model',
    'optim',
    'patches',
    'utils',
)


def keep_from_tracing() -> None:
    """Tell ``torch.compile`` to pass over this package's own functions.

    MMEngine compiles ``train_step``. The compiler would trace the averaging of gradients and the
    checks inside it, and break its graphs there; the model and the optimizer that these call are
    compiled all the same. Without a compiler nothing is done: MMEngine says what is needed.
    """
    if not hasattr(torch, 'compile'):
        return
    from torch import _dynamo

    # PyTorch 2.0 and 2.1 call it by its old name.
    rules = getattr(_dynamo, 'trace_rules', None) or _dynamo.skipfiles
    if not any('mmdevplug' in folder for folder in rules.SKIP_DIRS):
        for part in UNTRACED:
            rules.add(f'mmdevplug.{part}')
