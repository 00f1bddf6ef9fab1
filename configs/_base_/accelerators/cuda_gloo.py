# GPUs over gloo, for machines where nccl does not work.
__import__('mmdevplug')

runner_type = 'DeviceRunner'
accelerator = dict(type='cuda', backend='gloo')
