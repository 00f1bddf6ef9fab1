# The accelerator that MMDEVPLUG_ACCELERATOR names, or else the one that is present.
#
# These files hold two keys that no model's config has, because MMEngine refuses a key that two
# files of `_base_` share. The runner does the rest.
__import__('mmdevplug').follow_runner_type()

runner_type = 'DeviceRunner'
# backend: that of env_cfg where it suits the device, the device's own or gloo elsewhere.
accelerator = dict(type='auto', backend='auto')
