"""Declare the options of a config key: default, accepted types, meaning and check in one place."""

import dataclasses
from typing import Any, Callable, Dict, List, Mapping, Optional, Type

from mmdevplug.errors import DevPlugError

#: Checks the value of an option, given with its full key, and returns what its field holds.
Reader = Callable[[Any, str], Any]


def option(default: Any, accepts: str, meaning: str, read: Optional[Reader] = None) -> Any:
    """Declare an option as a field of a dataclass.

    Args:
        default: The value that a config has by leaving the option out.
        accepts (str): Types and words that a config may write, for the documentation.
        meaning (str): One line for the documentation.
        read (callable, optional): Takes a value and the full key, e.g. ``'accelerator.pad_to'``,
            and returns what the field holds. Raises DevPlugError for an impossible value.
            Defaults to None: the field holds the value as it is.

    Returns:
        dataclasses.Field: The field.
    """
    metadata = dict(default=default, accepts=accepts, meaning=meaning, read=read)
    held = default if read is None else read(default, '')
    return dataclasses.field(default=held, metadata=metadata)


def options_of(kind: Type) -> List[dataclasses.Field]:
    """List the fields of a dataclass that :func:`option` made."""
    return [field for field in dataclasses.fields(kind) if 'meaning' in field.metadata]


def read_values(
    kind: Type, given: Mapping[str, Any], key: str, problems: Optional[List[DevPlugError]] = None
) -> Dict[str, Any]:
    """Check the options of a dataclass that a config gives.

    Args:
        kind (type): The dataclass.
        given (Mapping): The options by name; other names are left out.
        key (str): The config key that holds them, e.g. ``'accelerator'``.
        problems (list, optional): Collects the errors; such an option keeps its default. Defaults
            to None: the first error is raised.

    Returns:
        dict: What the fields are to hold.

    Raises:
        DevPlugError: If an option has an impossible value.
    """
    values = {}
    for field in options_of(kind):
        if field.name not in given:
            continue
        value, read = given[field.name], field.metadata['read']
        try:
            values[field.name] = value if read is None else read(value, f'{key}.{field.name}')
        except DevPlugError as error:
            if problems is None:
                raise
            problems.append(error)
    return values


def read_flag(value: Any, key: str) -> bool:
    """Check an option that is on or off; None is off."""
    if value is None or isinstance(value, (bool, int)) and value in (0, 1):
        return bool(value)
    raise DevPlugError(f'{key}={value!r}: expected True or False.')


def read_switch(kind: Type) -> Reader:
    """Make the reader of an option that is on, off, or a dict of options of its own.

    Args:
        kind (type): The dataclass of these options.

    Returns:
        callable: Returns an instance, or None where the option is off.
    """

    def read(value: Any, key: str) -> Optional[Any]:
        if isinstance(value, bool):
            return kind() if value else None
        if _holds_options(value, kind):
            return kind(**value)
        raise DevPlugError(
            f'{key}={value!r}: expected True, False, or a dict with some of {_names(kind)}.'
        )

    return read


def read_dict(kind: Type) -> Reader:
    """Make the reader of an option that is a dict of options of its own.

    Args:
        kind (type): The dataclass of these options.

    Returns:
        callable: Returns an instance.
    """

    def read(value: Any, key: str) -> Any:
        if _holds_options(value, kind):
            return kind(**value)
        raise DevPlugError(f'{key}={value!r}: expected a dict with some of {_names(kind)}.')

    return read


def _holds_options(value: Any, kind: Type) -> bool:
    return isinstance(value, Mapping) and set(value) <= {one.name for one in options_of(kind)}


def _names(kind: Type) -> str:
    return ', '.join(one.name for one in options_of(kind))
