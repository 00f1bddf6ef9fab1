# bash tools/dist_train.sh configs/digits/digits_cpu.py 2
_base_ = ['./digits.py', '../_base_/accelerators/cpu.py']
