"""What ``mmdevplug doctor`` looks at, one module for each section of its report."""
