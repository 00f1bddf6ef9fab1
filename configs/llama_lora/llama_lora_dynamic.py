# The options of LoRA trainings that know `device_map_strategy` and its kin, as they stand.
_base_ = ['./llama_lora.py']

model_parallel = dict(
    enable=True,
    device_map_strategy='dynamic',
    use_dynamic_device_map=True,
    balance_threshold=0.2,
    force_balance=True,
    exclude_cpu=True,
    precision='bf16',
    check_r_consistency=True,
    strict_r_check=False,
)
