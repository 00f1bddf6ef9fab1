"""Start torch.distributed on any accelerator; exchange bytes and tensors between ranks."""
