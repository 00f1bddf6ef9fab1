"""A regular package: mmsegmentation installs a `tests` of its own, which would win otherwise."""
