# NVIDIA GPUs, or AMD GPUs with ROCm; the backend of env_cfg, nccl if there is none.
__import__('mmdevplug').follow_runner_type()

runner_type = 'DeviceRunner'
accelerator = dict(type='cuda')
