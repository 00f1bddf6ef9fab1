"""What runs import sooner or later: processes that are forked from a server find it there."""

import gc

import mmdevplug.gradients
import mmdevplug.model.loss_path  # noqa: F401

# What is there before a fork is not looked through again by each process.
gc.freeze()
# Python's own, which standins/quick changed for these imports: ranks' memory is measured.
gc.set_threshold(700, 10, 10)
