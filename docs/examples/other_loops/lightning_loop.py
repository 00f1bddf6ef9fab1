"""Lightning with one model over several devices: ``python lightning_loop.py cuda:0-1``."""

import sys

import lightning
import torch
from tiny_llama import tiny_llama

from mmdevplug.device_guard import DeviceGuard
from mmdevplug.model_parallel import dispatch, plan

devices = sys.argv[1]


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


tokens = torch.randint(3, 29, (20, 12), generator=torch.Generator().manual_seed(0))
task = Task()
trainer = lightning.Trainer(
    accelerator='cpu',  # where batches wait; the model's parts take them from there
    devices=1,
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
with DeviceGuard('move', model=task.held[0]) as guard:
    trainer.fit(task, torch.utils.data.DataLoader(tokens, batch_size=4))
print(guard.report())
print('losses', *[f'{loss:.6f}' for loss in task.losses])
