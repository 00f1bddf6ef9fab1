"""Declare options of a config key: default, accepted values, meaning and check in one place."""

import dataclasses
from ast import literal_eval
from difflib import get_close_matches
from itertools import filterfalse
from math import isfinite, isinf
from numbers import Real
from operator import attrgetter
from typing import (
    Any,
    Callable,
    ClassVar,
    Dict,
    Iterable,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Tuple,
    Type,
    TypeVar,
    Union,
)

from mmdevplug.errors import DevPlugError

#: Returns what a field holds of a value in a config, and gets the key for messages.
Reader = Callable[[object, str], object]
#: Whether a value in a config, of whatever type, is accepted.
Condition = Callable[[Any], bool]
Made = TypeVar('Made', bound='Options')
REQUIRED = dataclasses.MISSING


# checks -----------------------------------------------------------------------------------------


class Check(NamedTuple):
    """A condition of values: for a message in words, and for the documentation as types."""

    holds: Condition
    expected: str
    accepts: str


def whole(least: int, most: float = float('inf'), expected: str = '') -> Check:
    """Check a whole number; ``expected`` says so in other words."""
    usual = (
        f'{least} to {most}' if isinstance(most, int) else f'a whole number of at least {least}'
    )
    return Check(
        lambda value: _is(int, value) and least <= value <= most, expected or usual, 'int'
    )


def positive(zero: bool = False, most: float = float('inf')) -> Check:
    """Check a number below ``most``, also of NumPy: above 0, or of at least 0."""
    below = 'a finite number' if isinf(most) else f'a number below {most:,.0f},'
    return Check(
        lambda value: _is(Real, value) and (0 < value < most or (zero and value == 0)),
        f'{below} {"of at least" if zero else "above"} 0',
        'float',
    )


def _is(kind: Union[type, Tuple[type, ...]], value: object) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def choice(*words: object) -> Check:
    """Check that a value is one of some words or flags."""
    names = ', '.join(map(repr, words))
    return Check(words.__contains__, ' or '.join(names.rsplit(', ', 1)), names)


FLAG = Check(
    lambda value: value is None or (isinstance(value, int) and value in (0, 1)),
    'True or False',
    'bool',
)


#: Types by their names in the documentation; lists hold names or numbers.
_TYPES: Dict[str, Condition] = dict(
    bool=lambda value: isinstance(value, bool),
    int=lambda value: _is(int, value),
    float=lambda value: _is(Real, value) and isfinite(value),
    str=lambda value: isinstance(value, str),
    list=lambda value: (
        isinstance(value, (list, tuple)) and all(_is((str, int), each) for each in value)
    ),
    dict=lambda value: isinstance(value, Mapping),
)


def _by_types(metadata: Mapping[str, Any]) -> Optional[Check]:
    """Check the types of an option without a check and a reader of its own."""
    if metadata['accepts'] is None or metadata['read'] is not None:
        return None
    words = [word for word in metadata['accepts'].split(', ') if word != 'None']
    kinds = [_TYPES[word] for word in words if word in _TYPES]
    quoted = [literal_eval(word) for word in words if word not in _TYPES]

    def holds(value: object) -> bool:
        return any(kind(value) for kind in kinds) or (isinstance(value, str) and value in quoted)

    return Check(holds, ' or '.join(', '.join(words).rsplit(', ', 1)), metadata['accepts'])


# options ----------------------------------------------------------------------------------------


def option(
    default: object,
    meaning: str,
    check: Optional[Check] = None,
    read: Optional[Reader] = None,
    accepts: Optional[str] = None,
) -> Any:
    """Declare an option as a field of a subclass of :class:`Options`.

    Args:
        default: The value that a config has by leaving the option out.
        meaning: One line for the documentation.
        check: What values other than the default must fulfil.
        read: Returns what the field holds of a value; also gets the key: 'accelerator.pad_to'.
        accepts: Types and words for the documentation. Defaults to those of ``check``.
    """
    if accepts is None and check is not None:
        accepts = f'None, {check.accepts}' if default is None else check.accepts
    metadata = dict(default=default, accepts=accepts, meaning=meaning, check=check, read=read)
    return dataclasses.field(default=default, metadata=metadata)


def options_of(kind: type) -> List[dataclasses.Field]:
    """List the fields of a dataclass that :func:`option` made."""
    return [field for field in dataclasses.fields(kind) if 'meaning' in field.metadata]


class Options:
    """Base of the dataclasses of options; a wrong value is refused when an instance is made."""

    #: The config key that holds the options.
    key: ClassVar[str] = ''
    error: ClassVar[Type[DevPlugError]] = DevPlugError

    def __post_init__(self) -> None:
        for one in options_of(type(self)):
            self.check(one.name, getattr(self, one.name))

    @classmethod
    def names(cls) -> List[str]:
        """The names of the options."""
        return list(map(attrgetter('name'), options_of(cls)))

    @classmethod
    def check(cls, name: str, value: object, origin: Optional[str] = None) -> None:
        """Refuse an impossible value of an option, which a message calls ``origin``."""
        field = next(one for one in options_of(cls) if one.name == name)
        check = field.metadata['check'] or _by_types(field.metadata)
        if value is field.default or check is None:
            return
        try:
            if check.holds(value):
                return
        except (TypeError, ValueError, OverflowError):  # of an object that cannot be compared
            pass
        or_none = ', or None' if origin is None and field.default is None else ''
        found = f'{origin or f"{cls.key}.{name}"}={shortened(value)}'
        raise cls.error(f'{found}: expected {check.expected}{or_none}.')

    @classmethod
    def from_dict(cls: Type[Made], given: Mapping[str, object]) -> Made:
        """Make an instance, unless an option is unknown or has an impossible value."""
        refuse_unknown(given, cls.names(), cls.key, cls.error)
        return cls(**cls.read(given))

    @classmethod
    def read(
        cls, given: Mapping[str, object], problems: Optional[List[DevPlugError]] = None
    ) -> Dict[str, Any]:
        """Return the values of fields; names that are no options are left out.

        A list of ``problems`` collects the errors of options, which keep their defaults.
        """
        values = {}
        for field in options_of(cls):
            if field.name not in given:
                continue
            value, read = given[field.name], field.metadata['read']
            try:
                if read is not None:
                    value = read(value, f'{cls.key}.{field.name}')
                cls.check(field.name, value)
            except DevPlugError as error:
                if problems is None:
                    raise
                problems.append(error)
            else:
                values[field.name] = value
        return values


# names ------------------------------------------------------------------------------------------


def refuse_unknown(
    given: Iterable[object], known: Iterable[str], where: str, error: Type[Exception]
) -> None:
    """Refuse options that do not exist, and suggest the nearest that does."""
    known = list(known)
    unknown = list(filterfalse(known.__contains__, given))
    if unknown:
        raise error(
            f'{where} has no option {", ".join(map(repr, unknown))}{did_you_mean(unknown, known)} '
            f'Correct the name or remove it; known: {", ".join(known)}.'
        )


def did_you_mean(unknown: Iterable[object], known: Iterable[str]) -> str:
    """The end of a sentence about unknown names, with the nearest known ones."""
    known = list(known)
    names = [str(name).lower() for name in unknown if name not in known]
    by_lower = {name.lower(): name for name in known}
    found = [by_lower[match] for name in names for match in get_close_matches(name, by_lower, n=1)]
    return f'; did you mean {" and ".join(map(repr, dict.fromkeys(found)))}?' if found else '.'


def shortened(value: object) -> str:
    """Quote a value for a message, shortened to 60 characters if it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f'{text[:60]}... ({len(text)} characters)'


# readers ----------------------------------------------------------------------------------------


def flag(default: bool, meaning: str) -> Any:
    """Declare an option that is on (True, 1) or off (False, 0, None)."""
    return option(
        default,
        meaning,
        check=FLAG,
        read=lambda value, key: bool(value) if FLAG.holds(value) else value,
    )
