"""Explain errors of PyTorch, CUDA and OpenMMLab in words that say what to do."""
