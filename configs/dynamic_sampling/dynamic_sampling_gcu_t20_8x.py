# bash tools/dist_train.sh configs/dynamic_sampling/dynamic_sampling_gcu_t20_8x.py 8
_base_ = ['./dynamic_sampling.py', '../_base_/accelerators/gcu.py']

train_dataloader = dict(batch_size=16)  # on each of eight cards
