"""Helpers that know nothing of accelerators or of training."""
