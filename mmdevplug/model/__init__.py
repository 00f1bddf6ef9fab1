"""Prepare a model for its device: move it, and replace layers that the device cannot run."""
