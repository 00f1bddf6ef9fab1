# bash tools/dist_train.sh configs/remote_sensing/remote_sensing_gcu_t20_8x.py 8
_base_ = ['./remote_sensing.py', '../_base_/accelerators/gcu.py']

train_dataloader = dict(batch_size=2)  # on each of eight cards
