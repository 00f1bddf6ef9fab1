"""An explicit patch for scripts that build a runner by themselves and ignore ``runner_type``.

``custom_imports = dict(imports=['mmdevplug.autopatch'])`` in a config, or
``import mmdevplug.autopatch`` in a script, makes MMEngine's ``Runner(...)`` and
``Runner.from_cfg`` build a :class:`mmdevplug.DeviceRunner`, and puts that under subclasses.
"""

from .patches.runner_type import replace_runner

replace_runner()
