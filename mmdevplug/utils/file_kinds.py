"""Say what a file is that was given as a checkpoint and is none."""

import os
import re
import zipfile
import zlib
from typing import Optional, Union

#: How files begin that people take for checkpoints: pattern, what it is and what to do.
_KINDS = (
    (
        rb'version https://git-lfs',
        'a pointer of git-lfs, not the file that it points to. Run `git lfs pull`',
    ),
    (
        rb'\s*<(!doctype|html|head|\?xml)',
        'an HTML or XML page, as a server sends with a login or an error. Download the file again',
    ),
    (rb'\x1f\x8b', 'compressed with gzip. Unpack it'),
    (rb'.{8}\{"', 'a file of safetensors. Save its tensors with torch.save(dict(state_dict=...))'),
    (rb'\s*[{\[#"]', 'a text file. Give the checkpoint'),
)
#: A zip archive; a pickle, as PyTorch wrote it before 1.6.
_MAY_BE = (b'PK\x03\x04', b'\x80')


def describe_no_checkpoint(path: object) -> Optional[str]:
    """Say what a path is and what to do; None for a file that begins as a checkpoint does."""
    path = str(path)
    if os.path.isdir(path):
        return 'a directory. Give the path of a file in it'
    if not os.path.isfile(path):
        return None
    with open(path, 'rb') as file:
        head = file.read(256)
    if not head:
        return 'an empty file. Take the checkpoint before it, or copy it again'
    if head.startswith(_MAY_BE):
        return None
    for pattern, kind in _KINDS:
        if re.match(pattern, head, re.IGNORECASE | re.DOTALL):
            return kind
    return f'no checkpoint of PyTorch: it begins with {head[:8]!r}. Give another file'


def check_archive(path: Union[str, os.PathLike]) -> None:
    """Compare all bytes of a file that PyTorch has saved with the checksums inside of it.

    PyTorch does not compare them when it loads. A file that is no archive at all is not looked at.

    Raises:
        ValueError: If the file is truncated or damaged; says how.
        OSError: If it cannot be read.
    """
    try:
        if not zipfile.is_zipfile(str(path)):
            return
        with zipfile.ZipFile(str(path)) as archive:
            entries = archive.infolist()
            if min((each.header_offset for each in entries), default=1):
                # Another archive inside of it: the bytes of states are one, too.
                raise ValueError('it is truncated')
            for each in entries:
                # PyTorch compresses and encrypts nothing.
                if (
                    each.compress_type
                    or each.flag_bits & 1
                    or each.file_size != each.compress_size
                ):
                    raise ValueError(f'the entry {each.filename} of its directory is wrong')
            damaged = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise ValueError(str(error)) from error
    if damaged is not None:
        raise ValueError(f'{damaged} differs from its checksum')
