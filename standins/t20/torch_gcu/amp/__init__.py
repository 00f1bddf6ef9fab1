"""Mixed precision as the vendor offers it."""

from .autocast_mode import autocast, custom_bwd, custom_fwd  # noqa: F401
from .grad_scaler import GradScaler  # noqa: F401
