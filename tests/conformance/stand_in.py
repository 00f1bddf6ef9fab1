"""A config that brings the stand-in card."""

custom_imports = dict(imports=['fakecard_from_env'])
accelerator = dict(type='zeta')
