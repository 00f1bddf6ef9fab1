# PJRT_DEVICE=CPU CPU_NUM_DEVICES=3 python tools/train.py \
#     configs/llama_lora/llama_lora_3_devices.py --accelerator xla
_base_ = ['./llama_lora.py']

model_parallel = dict(enable=True, devices=3, strategy='balanced', precision='fp32')
