"""Explain errors of PyTorch and OpenMMLab in words that say what to do."""
