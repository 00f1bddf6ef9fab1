"""PyTorch's own tests over `staged`, MMEngine's with mmdevplug active: run_pytorch.py, run.py."""
