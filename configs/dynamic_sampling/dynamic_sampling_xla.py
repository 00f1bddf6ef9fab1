# PJRT_DEVICE=CPU CPU_NUM_DEVICES=2 bash tools/dist_train.sh \
#     configs/dynamic_sampling/dynamic_sampling_xla.py 2
_base_ = ['./dynamic_sampling.py', '../_base_/accelerators/xla.py']
