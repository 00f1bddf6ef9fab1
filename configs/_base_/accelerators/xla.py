# TPUs and other devices of torch_xla; gradients are averaged over gloo.
__import__('mmdevplug')

runner_type = 'DeviceRunner'
accelerator = dict(type='xla', backend='gloo')
