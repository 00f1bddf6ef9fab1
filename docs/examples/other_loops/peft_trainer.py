"""A LoRA of PEFT in the Trainer of transformers, the model over several devices:
``python peft_trainer.py cuda:0-1``."""

import sys

import torch
from peft import LoraConfig, get_peft_model
from tiny_llama import letters, tiny_llama
from transformers import Trainer, TrainingArguments

from mmdevplug.device_guard import DeviceGuard
from mmdevplug.model_parallel import dispatch, plan

devices = sys.argv[1]
torch.manual_seed(1)
lora = LoraConfig(r=4, target_modules=['q_proj', 'v_proj'], init_lora_weights='gaussian')
model = get_peft_model(tiny_llama(), lora)
if devices != 'cpu':
    dispatch(model, plan(model, devices, training=True))
tokens = letters(20)
trainer = Trainer(
    model,
    args=TrainingArguments(
        output_dir='out',
        max_steps=5,
        per_device_train_batch_size=4,
        learning_rate=0.01,
        logging_steps=1,
        report_to='none',
        save_strategy='no',
        use_cpu=devices == 'cpu',
        seed=0,
    ),
    train_dataset=[dict(input_ids=row, labels=row) for row in tokens],
)
with DeviceGuard('move', model=model) as guard:
    trainer.train()
print(guard.report())
print('losses', *[line['loss'] for line in trainer.state.log_history if 'loss' in line])
