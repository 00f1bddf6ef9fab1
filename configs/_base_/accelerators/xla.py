# TPUs and other devices of torch_xla; gradients are averaged over gloo.
__import__('mmdevplug').follow_runner_type()

runner_type = 'DeviceRunner'
accelerator = dict(type='xla', backend='gloo')
