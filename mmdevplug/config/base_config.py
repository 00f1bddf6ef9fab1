"""Where the package's configs lie."""

from pathlib import Path

from mmdevplug.errors import DevPlugError

_ACCELERATORS = Path(__file__).parents[1] / 'configs' / '_base_' / 'accelerators'


def base_config(name: str = 'auto') -> str:
    """Get the path of an accelerator's base config, for a config's ``_base_``.

    Args:
        name (str): Name of an accelerator or of a variant: ``'auto'``, ``'cpu'``, ``'cuda'``,
            ``'cuda_gloo'``, ``'xla'``, ``'gcu'``. Defaults to ``'auto'``.

    Raises:
        DevPlugError: If there is no such base config.

    Examples:
        >>> _base_ = ['./my_segformer.py', __import__('mmdevplug').base_config('gcu')]
    """
    path = _ACCELERATORS / f'{name}.py'
    if not path.is_file():
        names = sorted(p.stem for p in _ACCELERATORS.glob('*.py') if p.stem != '__init__')
        raise DevPlugError(
            f'base_config({name!r}): there is no such base config. Expected one of '
            f'{", ".join(names)}. For another accelerator take base_config("auto") and add '
            f'accelerator=dict(type={name!r}) to your config.'
        )
    return str(path)
