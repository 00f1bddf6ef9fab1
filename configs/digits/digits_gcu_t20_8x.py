# bash tools/dist_train.sh configs/digits/digits_gcu_t20_8x.py 8
_base_ = ['./digits.py', '../_base_/accelerators/gcu.py']

train_dataloader = dict(batch_size=16)  # on each of eight cards
