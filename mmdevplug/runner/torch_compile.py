"""Keep ``torch.compile`` from tracing this package."""

import torch

#: Collectives, checks and copies, at which the compiler would break its graphs.
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
    """Exclude this package from the ``train_step`` that MMEngine compiles.

    The model and the optimizer that it calls are compiled all the same.
    """
    if not hasattr(torch, 'compile'):
        return  # MMEngine's own error says what is needed
    from torch import _dynamo

    # PyTorch 2.0 and 2.1 call it by its old name.
    rules = getattr(_dynamo, 'trace_rules', None) or _dynamo.skipfiles
    if not any('mmdevplug' in folder for folder in rules.SKIP_DIRS):
        for part in UNTRACED:
            rules.add(f'mmdevplug.{part}')
