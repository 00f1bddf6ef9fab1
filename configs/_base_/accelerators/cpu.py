# Any number of processes on the host's CPU, over gloo whatever env_cfg asks for.
__import__('mmdevplug').follow_runner_type()

runner_type = 'DeviceRunner'
accelerator = dict(type='cpu', backend='gloo')
