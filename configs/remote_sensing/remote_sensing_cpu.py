# bash tools/dist_train.sh configs/remote_sensing/remote_sensing_cpu.py 2
_base_ = ['./remote_sensing.py', '../_base_/accelerators/cpu.py']
