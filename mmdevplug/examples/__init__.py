"""Worked examples: what the configs outside ``_base_`` build."""
