"""Train on all chips of a host from one process: torch_xla partitions each graph (SPMD)."""
