"""The functions that ``torch_gcu`` offers under its own name, and some that it does not."""
