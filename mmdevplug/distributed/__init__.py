"""Start torch.distributed on any accelerator, and carry bytes and tensors between ranks."""
