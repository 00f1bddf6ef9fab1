"""Let MMEngine find the configs of this checkout in an environment with an editable install.

For ``read_base()`` MMEngine looks for a folder ``mmdevplug`` beside the metadata of the
installation. An editable install has no such folder, and a wheel cannot hold a
link. So the link is made here, and added to the RECORD of the installation: pip then removes the
link before it installs or uninstalls mmdevplug, and never writes through it into the checkout.
"""

import sys
from importlib.metadata import distributions
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / 'mmdevplug'


def main() -> None:
    """Make the link in the environment of this Python."""
    found = list(distributions(name=PACKAGE.name))
    files = [Path(file.locate()) for each in found for file in each.files or ()]
    records = [file for file in files if file.name == 'RECORD']
    if found and not records:
        return  # setuptools before 64: the metadata lie in the checkout, beside the package
    link = records[0].parents[1] / PACKAGE.name if records else None
    if link is None or (link.exists() and not link.is_symlink()):
        sys.exit(f'{sys.prefix}: expected an editable install of mmdevplug. Run: pip install -e .')
    if link.is_symlink():
        link.unlink()
    link.symlink_to(PACKAGE)
    text, entry = records[0].read_text(encoding='utf-8'), f'{link.name},,'
    if entry not in text.splitlines():
        records[0].write_text(f'{text}{entry}\n', encoding='utf-8')


if __name__ == '__main__':
    main()
