"""Where ranks meet: as in PyTorch, with handlers of its own."""

from torch.distributed import rendezvous as _rendezvous_of_torch

_handlers = {}


def register_rendezvous_handler(scheme, handler):
    if scheme in (*_handlers, 'tcp', 'env', 'file'):
        raise RuntimeError(f'Rendezvous handler for {scheme}:// already registered')
    _handlers[scheme] = handler


def rendezvous(url, rank=-1, world_size=-1, **kwargs):
    if not isinstance(url, str):
        raise RuntimeError(f'`url` must be a string. {type(url)}: {url}')
    scheme = url.split('://')[0]
    if scheme in _handlers:
        return _handlers[scheme](url, **kwargs)
    return _rendezvous_of_torch(url, rank, world_size, **kwargs)
