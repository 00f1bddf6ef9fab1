"""Checkpoints: collected, written, found, read, and continued from."""
