# Enflame GCU, T20 and S60; gradients are averaged over gloo, whatever env_cfg asks for.
__import__('mmdevplug')

runner_type = 'DeviceRunner'
accelerator = dict(type='gcu', backend='gloo')
