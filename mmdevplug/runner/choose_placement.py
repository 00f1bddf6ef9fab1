"""Choose where the weights of a model are, from the keys ``model_parallel`` and ``sharding``."""

from typing import Any, Optional

from mmdevplug.errors import ModelError
from mmdevplug.model.placement import WHOLE, Placement


def choose_placement(
    model_parallel: Any, sharding: Any, model: Any, optim_wrapper: Any, scope: Optional[str]
) -> Placement:
    """Choose; the arguments are those of :class:`DeviceRunner`.

    Raises:
        ModelError: If both keys ask for a placement.
    """
    spread: Optional[Placement] = None
    if model_parallel not in (None, False):
        from mmdevplug.model_parallel.apply_options import Parallelism

        spread = Parallelism.from_config(model_parallel, model, optim_wrapper, scope)
    if sharding in (None, False):
        return spread or WHOLE
    if spread is not None:
        raise ModelError(
            'sharding and model_parallel: each arranges the model its own way. Keep one.'
        )
    from mmdevplug.sharding import Sharding

    return Sharding(sharding)
