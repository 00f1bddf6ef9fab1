"""Operators of mmcv, which MMEngine imports for each model that one process trains."""

import gc
from contextlib import suppress

with suppress(ImportError):
    import mmcv.ops  # noqa: F401

gc.freeze()
