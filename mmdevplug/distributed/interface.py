"""Choose the network interface over which gloo connects the ranks."""

import json
import os
import socket
from datetime import timedelta

from torch import distributed as torch_dist

from mmdevplug.environments.launch_variables import LaunchEnv
from mmdevplug.environments.loopback import LOOPBACK, addresses_between, interface_of, is_loopback
from mmdevplug.fault_tolerance.store_barrier import wait_until
from mmdevplug.utils.torch_compat import get_text, set_text


def choose_interface(store: 'torch_dist.Store', env: LaunchEnv, timeout: timedelta) -> str:
    """Have gloo use the interface that leads to the other ranks; return what a message says of it.

    By itself gloo takes the address of the host's own name, which fails on many machines: Debian
    and Ubuntu give it 127.0.1.1. A job of one host stays on the loopback interface.
    """
    if 'GLOO_SOCKET_IFNAME' in os.environ:
        return f' of GLOO_SOCKET_IFNAME={os.environ["GLOO_SOCKET_IFNAME"]}'
    if env.single_host:
        names = [name for _, name in socket.if_nameindex() if name in ('lo', 'lo0')]
        address = LOOPBACK
    else:
        address, main = addresses_between(env.master_addr)
        key = 'mmdevplug/main_address'
        if not is_loopback(main) and address != main:
            # Its own name may lead the main host to itself: another host knows its address.
            set_text(store, f'{key}/text', json.dumps(main))
            store.add(f'{key}/there', 1)
        store.add(f'{key}/arrived', 1)
        if is_loopback(address):

            def known() -> bool:
                arrived = store.add(f'{key}/arrived', 0)
                return store.add(f'{key}/there', 0) > 0 or arrived >= env.world_size

            wait_until(known, timeout.total_seconds())
            if store.add(f'{key}/there', 0):  # else the hosts are containers that share this one's
                address = json.loads(get_text(store, f'{key}/text'))
        names = [name for name in [interface_of(address)] if name is not None]
    if not names:
        return ''
    os.environ['GLOO_SOCKET_IFNAME'] = names[0]
    return f' of the interface {names[0]} ({address}), which leads to {env.master_addr}'
