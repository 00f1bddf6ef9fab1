"""MMEngine's own tests with mmdevplug active; see run.py."""
