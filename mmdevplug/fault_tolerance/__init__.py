"""Detect ranks that fail or hang, and end the others with a message."""
