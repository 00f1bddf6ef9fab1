"""The command ``mmdevplug`` and the scripts in ``tools/``."""
