"""What importing ``torch_gcu`` replaces in PyTorch."""

import torch
import torch._tensor_str
import torch._utils
from t20_card import card

_tensor_str_of_torch = torch._tensor_str._tensor_str


def is_gcu(self):
    return self.device.type == 'xla'


def _tensor_str(self, indent):
    return _tensor_str_of_torch(self.cpu() if self.is_gcu() else self, indent)


def _rebuild_device_tensor_from_numpy_gcu(data, dtype, device, requires_grad):
    """Rebuild a saved tensor: on the host, unless it was saved on the card that is current."""
    tensor = torch.from_numpy(data).to(dtype=dtype)
    if not device.startswith('xla') or device == f'xla:{card.current_device()}':
        tensor = tensor.to(device)
    tensor.requires_grad = requires_grad
    return tensor


torch.Tensor.is_gcu = is_gcu
torch._tensor_str._tensor_str = _tensor_str
torch._utils._rebuild_device_tensor_from_numpy = _rebuild_device_tensor_from_numpy_gcu
