"""A config that brings the stand-in card under the name ``zeta``, e.g. for ``--card-config``."""

custom_imports = dict(imports=['fakecard_from_env'])
accelerator = dict(type='zeta')
