"""The config key ``sharding``: how a model is sharded over the ranks of a job."""

from dataclasses import dataclass
from typing import List, Mapping, Optional, Union

from mmdevplug.errors import ModelError

from .fields import Check, Options, choice, flag, option, whole

_NAMES = Check(
    lambda value: (
        isinstance(value, (list, tuple))
        and len(value) > 0
        and all(isinstance(each, str) for each in value)
    ),
    'a list of names of classes or modules',
    'list',
)


@dataclass(frozen=True)
class ShardingOptions(Options):
    """How a model is sharded, parsed and checked by :meth:`from_config`."""

    key, error = 'sharding', ModelError

    blocks: Optional[List[str]] = option(
        None,
        'Classes or modules that are gathered one at a time, whole; `None` finds them.',
        check=_NAMES,
    )
    ranks: Optional[int] = option(
        None,
        'Ranks that hold one copy of the model together; other ranks hold more copies; '
        '`None`: all ranks.',
        check=whole(1),
    )
    reshard_after_forward: bool = flag(
        True,
        'Free blocks after the forward pass, and gather them again in backward; `False` takes '
        'memory and sends a third less.',
    )
    mixed_precision: Optional[str] = option(
        None,
        "`'bf16'`: blocks are gathered and computed in bfloat16, gradients are averaged in "
        'float32; weights and optimizer stay as they are.',
        check=choice('bf16'),
    )
    offload: bool = flag(
        False,
        'Keep weights, gradients and states of the optimizer in host memory, where the optimizer '
        'computes: a card holds the blocks that compute. No effect on the CPU.',
    )
    sharded_checkpoint: bool = flag(
        False,
        'Each rank writes its shards of a checkpoint into a folder beside the `.pth` file, which '
        'has the rest; it resumes on any number of ranks.',
    )

    @classmethod
    def from_config(cls, config: Union[bool, Mapping[str, object]]) -> 'ShardingOptions':
        """Parse and check the config key: True, or a dict of options."""
        if config is not True and not isinstance(config, Mapping):
            raise ModelError(
                f'sharding={config!r}: expected True, False or a dict such as dict(ranks=4).'
            )
        options: ShardingOptions = cls.from_dict({} if config is True else config)
        return options
