"""Say for which release of PyTorch an installed package was built. Imports no torch."""

import re
from contextlib import suppress
from importlib import metadata
from typing import List, Optional


def describe_torch_requirement(package: str) -> str:
    """A sentence with the torch that a package asks for and the one that is installed.

    Empty if the package is not listed as installed, or asks for none.
    """
    found: Optional[metadata.Distribution] = None
    with suppress(metadata.PackageNotFoundError):
        found = metadata.distribution(package.split('.')[0])
    asked: List[str] = []
    for requirement in found.requires or [] if found is not None else []:
        name = requirement.split(';')[0].strip()
        if re.match(r'torch\s*([(=<>!~]|$)', name):
            asked.append(name)
    if found is None or not asked:
        return ''
    installed = 'none'
    with suppress(metadata.PackageNotFoundError):
        installed = metadata.version('torch')
    return (
        f'{package} {found.version} asks for {", ".join(asked)}; installed is torch {installed}.'
    )
