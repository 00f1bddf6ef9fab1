"""Check that low-rank adapters (LoRA) all have the same rank."""

from typing import Dict, List, Mapping

from torch import nn

from mmdevplug.errors import ModelError
from mmdevplug.utils.logs import log_warning


def check_r_consistency(model: nn.Module, strict: bool = False) -> Dict[int, List[str]]:
    """Warn if adapters have different ranks, which is mostly a mistake.

    A checkpoint of such adapters cannot be loaded by a config that states one rank, and layers
    that are alike weigh differently. Adapters are those of peft or of the same kind: layers with
    ``lora_A`` and a rank, or one for each adapter, in ``r``.

    Args:
        model (nn.Module): Any model, with or without adapters.
        strict (bool): Whether to raise ModelError instead of a warning. Defaults to False.

    Returns:
        Dict[int, List[str]]: For each rank, the layers that have it, in the model's order; empty
        for a model without adapters.
    """
    layers: Dict[int, List[str]] = {}
    for name, module in model.named_modules():
        # The module's own attribute: wrappers pass on those of what they hold.
        found = vars(module).get('r')
        if found is None or not hasattr(module, 'lora_A'):
            continue
        adapters = found if isinstance(found, Mapping) else {'default': found}
        for adapter, rank in adapters.items():
            layer = name if len(adapters) == 1 else f'{name} (adapter {adapter!r})'
            layers.setdefault(int(rank), []).append(layer)
    if len(layers) > 1:
        message = _describe(layers)
        if strict:
            raise ModelError(message)
        log_warning(message)
    return layers


def _describe(layers: Mapping[int, List[str]]) -> str:
    parts = []
    for rank, names in sorted(layers.items()):
        more = f' and {len(names) - 3} more' if len(names) > 3 else ''
        parts.append(f'r={rank} in {", ".join(names[:3])}{more}')
    return (
        f'the adapters have {len(layers)} different ranks, expected one: {"; ".join(parts)}. Give '
        f'all of them the same r (in LoraConfig: r, and no rank_pattern), or, if the ranks are to '
        f'differ, set model_parallel.check_r_consistency=False.'
    )
