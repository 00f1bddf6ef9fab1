"""A regular package: one named ``docs`` that some distribution installs would win otherwise."""
