"""A libtpu that computes on the CPU; `make install-tpu` installs it."""

from setuptools import Extension, setup

setup(
    name='libtpu',
    version='0.0.50+cpu',
    packages=['libtpu'],
    # No module of Python: setuptools only has to compile it.
    ext_modules=[Extension('libtpu.plugin', ['libtpu/plugin.c'])],
)
