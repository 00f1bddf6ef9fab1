"""A stand-in for Enflame's ``torch_gcu 1.10`` (T20 generation).

Names, modules, arguments and errors are the vendor's. The card is ``t20_card`` beside this
package: its ``calls`` and ``card.stats`` count what ran.
"""

# ruff: isort: skip_file
from . import _GCUC  # noqa: E402, F401
from .core import pytorch_override  # noqa: E402, F401
from .core.random import *  # noqa: E402, F403
from .core.model import *  # noqa: E402, F403
from .core.device import *  # noqa: E402, F403
from .core.debug import *  # noqa: E402, F403
from .core.experiment import *  # noqa: E402, F403
from .core.version import *  # noqa: E402, F403
from .utils import data  # noqa: E402, F401
from . import amp, nn  # noqa: E402, F401
