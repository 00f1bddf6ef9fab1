_base_ = ['../../configs/digits/digits.py', __import__('mmdevplug').base_config('auto')]

accelerator = dict(
    type='acme',  # the name that the card has in PyTorch
    package='torch_acme',  # imported before the device is looked for
    visible_devices_env='ACME_VISIBLE_DEVICES',  # named in messages, never changed
)
