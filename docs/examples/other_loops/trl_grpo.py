"""TRL's GRPOTrainer with one model over several devices: ``python trl_grpo.py cuda:0-1``."""

import sys

from datasets import Dataset
from tiny_llama import tiny_llama, tiny_tokenizer
from transformers import set_seed
from trl import GRPOConfig, GRPOTrainer

from mmdevplug.device_guard import DeviceGuard
from mmdevplug.model_parallel import dispatch, plan

devices = sys.argv[1]


class Grpo(GRPOTrainer):
    """Returns the loss where the trainer adds losses up, whichever device computed it."""

    def training_step(self, *args, **options):
        return super().training_step(*args, **options).to(self.args.device)


model = tiny_llama()
if devices != 'cpu':
    dispatch(model, plan(model, devices, training=True))
set_seed(0)
trainer = Grpo(
    model,
    reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
    args=GRPOConfig(
        output_dir='out',
        max_steps=3,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=6,
        logging_steps=1,
        learning_rate=0.01,
        report_to='none',
        save_strategy='no',
        bf16=False,  # its default, which a card may lack
        use_cpu=devices == 'cpu',
    ),
    train_dataset=Dataset.from_dict({'prompt': ['a b c', 'd e f', 'a c e', 'b d f'] * 3}),
    processing_class=tiny_tokenizer(),
)
with DeviceGuard('move', model=model) as guard:
    trainer.train()
print(guard.report())
print('losses', *[line['loss'] for line in trainer.state.log_history if 'loss' in line])
