"""Lightning with one model over several devices: ``python lightning_loop.py cuda:0-1``.

``--epochs 2 --resume lightning.ckpt`` goes on with what an earlier run saved.
"""

import argparse

import lightning
import torch
from tiny_llama import letters, tiny_llama

from mmdevplug.device_guard import DeviceGuard
from mmdevplug.model_parallel import dispatch, plan

parser = argparse.ArgumentParser()
parser.add_argument('devices')
parser.add_argument('--epochs', type=int, default=1)
parser.add_argument('--resume')
args = parser.parse_args()
devices = args.devices


class Task(lightning.LightningModule):
    """Holds the model in a list: Lightning would move a submodule to a device of its own."""

    def __init__(self):
        super().__init__()
        self.held = [tiny_llama()]
        if devices != 'cpu':
            dispatch(self.held[0], plan(self.held[0], devices, training=True))
        self.losses = []

    def training_step(self, batch, index):
        loss = self.held[0](input_ids=batch, labels=batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.held[0].parameters(), lr=0.01)

    def on_save_checkpoint(self, checkpoint):
        # Lightning sees no weights in a list. They are saved from the host, to load anywhere.
        weights = self.held[0].state_dict()
        checkpoint['held'] = {name: tensor.cpu() for name, tensor in weights.items()}

    def on_load_checkpoint(self, checkpoint):
        self.held[0].load_state_dict(checkpoint['held'])

    def on_train_start(self):
        # Lightning moves the states of optimizers to its own device; each belongs to its weight.
        for optimizer in self.trainer.optimizers:
            for weight, state in optimizer.state.items():
                for name, value in state.items():
                    if name != 'step' and torch.is_tensor(value):
                        state[name] = value.to(weight.device)


tokens = letters(20)
task = Task()
trainer = lightning.Trainer(
    accelerator='cpu',  # where batches wait; the model's parts take them from there
    devices=1,
    max_epochs=args.epochs,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
with DeviceGuard('move', model=task.held[0]) as guard:
    trainer.fit(task, torch.utils.data.DataLoader(tokens, batch_size=4), ckpt_path=args.resume)
trainer.save_checkpoint('lightning.ckpt')
print(guard.report())
print('losses', *[f'{loss:.6f}' for loss in task.losses])
