"""What a lazy device leaves to the host: losses, RoIs, masks and predictions of detectors."""
