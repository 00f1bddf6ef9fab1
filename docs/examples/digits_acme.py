_base_ = ['../../configs/digits/digits.py', __import__('mmdevplug').base_config('auto')]

custom_imports = dict(imports=['my_accelerator', 'mmdevplug.examples.digits'])
accelerator = dict(type='acme')
