"""See torch_tpu."""
