# Enflame GCU. On a T20, gradients are averaged over gloo, whatever env_cfg asks for; on an S60,
# over eccl, where torch_gcu brings it.
__import__('mmdevplug').follow_runner_type()

runner_type = 'DeviceRunner'
accelerator = dict(type='gcu', backend='auto')
