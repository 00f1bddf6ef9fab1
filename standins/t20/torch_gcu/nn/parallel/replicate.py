"""Copies of a module on several cards, through which autograd finds the original parameters."""

from torch.nn.parallel.replicate import _replicatable_module

from . import comm


def replicate(network, devices, detach=False):
    if not _replicatable_module(network):
        raise RuntimeError(
            'Cannot replicate network where python modules are childrens of ScriptModule'
        )
    modules = list(network.modules())
    return [_copy(modules, comm._card(device), detach) for device in devices]


def _copy(modules, device, detach):
    copies = {module: module._replicate_for_data_parallel() for module in modules}
    for module, copied in copies.items():
        for name, child in module._modules.items():
            copied._modules[name] = copies.get(child)
        for name, tensor in module._parameters.items():
            moved = None if tensor is None else tensor.to(device)
            # A parameter's copy is no leaf, and so no parameter.
            setattr(copied, name, moved.detach() if detach and moved is not None else moved)
        for name, tensor in module._buffers.items():
            copied._buffers[name] = None if tensor is None else tensor.to(device)
    return copies[modules[0]]
