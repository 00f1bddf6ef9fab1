"""Read the index of a folder of ``torch.distributed.checkpoint`` without running what it names."""

import os
import pickle
from typing import Any

import torch

from mmdevplug.errors import CheckpointError

#: Classes in the index of a folder of shards; those of bytes would be unpickled without limits.
_OF_INDEX = (
    *('Metadata', 'StorageMeta', 'MetadataIndex', 'TensorStorageMetadata', 'TensorProperties'),
    *('ChunkStorageMetadata', '_MEM_FORMAT_ENCODING'),
)


def reader_of_shards(folder: str) -> Any:
    """PyTorch's reader of a folder of shards, which builds nothing but parts of such an index."""
    from torch.distributed.checkpoint import FileSystemReader, filesystem, metadata as parts

    known = {
        *((parts.__name__, name) for name in _OF_INDEX),
        (filesystem.__name__, '_StorageInfo'),
        *((module, 'PosixPath') for module in ('pathlib', 'pathlib._local')),
        *(('torch', 'Size'), ('torch.serialization', '_get_layout')),
    }

    def member(kind: object, name: str) -> object:
        return parts._MEM_FORMAT_ENCODING[name]

    class Index(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> object:
            if (module, name) == ('builtins', 'getattr'):
                return member  # how Python before 3.11.4 pickles a member of an enumeration
            is_dtype = module == 'torch' and isinstance(getattr(torch, name, None), torch.dtype)
            if (module, name) in known or is_dtype:
                return super().find_class(module, name)
            raise CheckpointError(
                f'{folder}/.metadata names {module}.{name}, which no index of shards holds and '
                f'which could run code. It was not written by mmdevplug: do not load it.'
            )

    class Reader(FileSystemReader):
        def read_metadata(self, *args: object, **kwargs: object) -> Any:
            with open(os.path.join(folder, '.metadata'), 'rb') as file:
                found = Index(file).load()
            found.storage_meta.load_id = self.load_id
            for place in found.storage_data.values():
                if os.path.basename(place.relative_path) != place.relative_path:
                    raise CheckpointError(f'{folder}/.metadata names {place.relative_path!r}.')
            return found

    return Reader(folder)
