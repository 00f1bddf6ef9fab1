"""A parser of arguments whose refusals take one line, with the option that was meant."""

import argparse
import sys
from typing import NoReturn, Optional, Sequence

from mmdevplug.config.fields import did_you_mean


class Parser(argparse.ArgumentParser):
    """argparse's parser without abbreviations, and without the usage before an error."""

    def parse_args(  # type: ignore[override]
        self, args: Optional[Sequence[str]] = None, namespace: Optional[argparse.Namespace] = None
    ) -> argparse.Namespace:
        """Parse all arguments.

        Unknown options are refused first: else argparse would say only that CONFIG is missing.
        """
        args = list(sys.argv[1:] if args is None else args)
        known = list(self._option_string_actions)
        for word in args:
            name = word.partition('=')[0]
            if name.startswith('--') and name not in known:
                self.error(f'no option {name}{did_you_mean([name], known)}')
        found, rest = self.parse_known_args(args, namespace)
        if rest and rest[0].startswith('-'):
            self.error(f'no option {rest[0]}{did_you_mean(rest[:1], known)}')
        if rest:
            self.error(f'{rest[0]!r} is one argument too many.')
        return found

    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line, and end with status 2."""
        end = '' if message.endswith(('.', '?')) else '.'
        print(f'{self.prog}: {message}{end} All options: {self.prog} --help', file=sys.stderr)
        sys.exit(2)
