# PJRT_DEVICE=CPU CPU_NUM_DEVICES=2 bash tools/dist_train.sh configs/digits/digits_xla.py 2
_base_ = ['./digits.py', '../_base_/accelerators/xla.py']
