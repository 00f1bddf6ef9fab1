"""Refuse a checkpoint to resume from, with what to do."""

from mmdevplug.config.fields import shortened
from mmdevplug.errors import CheckpointError
from mmdevplug.utils.state_types import differences


def refusal(
    where: str, said: str, advice: str = 'Resume with the config of the checkpoint'
) -> CheckpointError:
    """Return the error for a checkpoint that does not fit, with what to do."""
    return CheckpointError(
        f'{said} {advice}; or take the weights alone, without --resume: --cfg-options '
        f'load_from={where}.'
    )


def refuse_other_types(found: object, like: object, filename: str, where: str = '') -> None:
    """Refuse values of other types than those of a state that has the same keys.

    Raises:
        CheckpointError: With the key, its value and what is expected.
    """
    for place, value, wanted in differences(found, like, where):
        raise refusal(
            filename,
            f'Cannot resume: {place}={shortened(value)} in checkpoint {filename}; expected '
            f'{wanted}. The file was changed, or another program wrote it.',
        )
