"""What lazy devices alone leave to the host: losses, RoIs, masks and predictions of detectors."""
