# GPUs over gloo, for machines where nccl does not work.
__import__('mmdevplug').follow_runner_type()

runner_type = 'DeviceRunner'
accelerator = dict(type='cuda', backend='gloo')
