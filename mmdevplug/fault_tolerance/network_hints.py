"""Suggest what to try when the network is at fault, for the backend in use."""

from torch import distributed as torch_dist

from mmdevplug.accelerators.backend import backend_of
from mmdevplug.environments.launch import LaunchEnv


def network_hint(env: LaunchEnv) -> str:
    """A sentence for the end of a message, empty where there is nothing to try.

    Args:
        env (LaunchEnv): How this process was started.
    """
    if not (torch_dist.is_available() and torch_dist.is_initialized()):
        return ''
    backend = backend_of()
    if 'nccl' in backend:
        return (
            ' If all ranks are well: NCCL_SOCKET_IFNAME names the network interface to use, and '
            'NCCL_P2P_DISABLE=1 rules out direct copies between the cards of a host.'
        )
    if 'hccl' in backend:
        return ' If all ranks are well: HCCL_SOCKET_IFNAME names the network interface to use.'
    if 'gloo' in backend and not env.single_host:
        return (
            ' If all ranks are well: GLOO_SOCKET_IFNAME names the network interface to use on '
            'each host.'
        )
    return ''
