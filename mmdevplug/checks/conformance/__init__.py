"""Checks that an accelerator does what training needs: ``mmdevplug conformance``."""
