# bash tools/dist_train.sh configs/dynamic_sampling/dynamic_sampling_cpu.py 2
_base_ = ['./dynamic_sampling.py', '../_base_/accelerators/cpu.py']
