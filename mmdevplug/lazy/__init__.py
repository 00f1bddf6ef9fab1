"""Compute losses, RoIs, masks and predictions of detectors on the host, for lazy devices."""
