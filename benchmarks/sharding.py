"""Sharded training on the CPU beside DDP and FSDP2: memory of a rank, time, bytes sent.

Ways ``ddp`` and ``sharded`` are trainings by DeviceRunner with random weights and AdamW;
``fsdp2`` is the same with PyTorch alone: ``fully_shard`` over gloo, in a loop written by hand.
``tensors_mb`` is the most that a rank's tensors took: weights, gradients, states of the optimizer
and gathered blocks, looked at after each block's forward pass, before its backward pass and around
the update.
``peak_mb`` is the most that the process held (``VmHWM``) above what it held before it built the
model, with modules that it imported then and what the allocator kept. Bytes are those of the
loopback interface: run it as root in a network of its own, ``unshare -n``.

python benchmarks/sharding.py [--models gpt2-medium vit-l] [--ways ddp fsdp2 sharded] [--nproc 2 4]
                              [--iters 4] [--json FILE]
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODELS = ('gpt2-medium', 'vit-l', 'gpt2-tiny')
WAYS = ('ddp', 'fsdp2', 'sharded')


def memory(name):
    """A figure of this process in MB: ``VmHWM`` or ``VmRSS``."""
    text = Path('/proc/self/status').read_text(encoding='ascii')
    return int(re.search(rf'{name}:\s+(\d+)', text).group(1)) / 1024


def sent():
    """Bytes that the loopback interface has sent."""
    text = Path('/proc/net/dev').read_text(encoding='ascii')
    return int(re.search(r'lo:\s*(.*)', text).group(1).split()[8])


def tensor_bytes():
    """Bytes of the storages that Python's tensors refer to."""
    import gc

    import torch

    storages = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor) and each.device.type == 'cpu':
            each = getattr(each, '_local_tensor', each)
            storages[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return sum(storages.values())


def build_model(name):
    """A model of MMEngine around transformers' GPT-2, or ViT-L of mmseg under a linear head."""
    from mmengine.model import BaseModel
    from torch import nn

    class Language(BaseModel):
        def __init__(self):
            super().__init__()
            from transformers import GPT2Config, GPT2LMHeadModel

            sizes = dict(n_embd=1024, n_layer=24, n_head=16)
            if name == 'gpt2-tiny':
                sizes = dict(n_embd=512, n_layer=8, n_head=8, vocab_size=4096)
            self.net = GPT2LMHeadModel(GPT2Config(n_positions=64, use_cache=False, **sizes))

        def forward(self, inputs, mode='tensor'):
            return dict(loss=self.net(input_ids=inputs, labels=inputs).loss)

    class Vision(BaseModel):
        def __init__(self):
            super().__init__()
            from mmseg.models.backbones import VisionTransformer

            self.net = VisionTransformer(
                img_size=(64, 64), embed_dims=1024, num_layers=24, num_heads=16, out_indices=(23,)
            )
            self.head = nn.Conv2d(1024, 10, 1)

        def forward(self, inputs, mode='tensor'):
            images = inputs.float().view(len(inputs), 1, 1, -1).expand(-1, 3, 64, 64)
            return dict(loss=self.head(self.net(images)[0]).square().mean())

    return Vision if name == 'vit-l' else Language


class Notes:
    """What one rank measures while it trains."""

    def __init__(self, iters):
        self.iters = iters
        self.times, self.cpu_times, self.sent, self.tensors = [], [], [], []

    def watch(self, model, optimizer):
        """Look at the tensors around each block and each update."""
        for part in model.modules():
            if type(part).__name__.endswith(('GPT2Block', 'TransformerEncoderLayer')):
                part.register_forward_hook(self._look_twice)
        optimizer.register_step_pre_hook(self._look)
        optimizer.register_step_post_hook(self._look)

    def _look(self, *_):
        if len(self.times) == self.iters - 1:  # the last iteration, whose time does not count
            self.tensors.append(tensor_bytes())

    def _look_twice(self, module, args, output):
        self._look()
        output = output[0] if isinstance(output, tuple) else output
        output.register_hook(self._look)

    def end_iteration(self):
        """Note times and bytes once all ranks have ended an iteration."""
        import torch

        torch.distributed.barrier()
        self.times.append(time.perf_counter())
        self.cpu_times.append(time.process_time())
        self.sent.append(sent())

    def show(self, before, built, size):
        """Print the figures of this rank as JSON."""
        last = len(self.times) - 2
        found = dict(rank=int(os.environ['RANK']), weights=size / 2**20, built=built)
        found.update(peak=memory('VmHWM') - before, tensors=max(self.tensors) / 2**20)
        found.update(
            seconds=(self.times[last] - self.times[0]) / last,
            cpu_seconds=(self.cpu_times[last] - self.cpu_times[0]) / last,
            sent=(self.sent[last] - self.sent[0]) / last / 2**20,
        )
        print(json.dumps(found), flush=True)


def tokens_of(model, index):
    """The tokens of a sample."""
    import torch

    seeded = torch.Generator().manual_seed(index)
    return torch.randint(0, 4096 if model == 'gpt2-tiny' else 50257, (64,), generator=seeded)


def bytes_of(model):
    """Bytes of all weights."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def prepare(name):
    """What a first use of transformers and mmseg takes is none of the model's."""
    build = build_model(name)
    import transformers.models.gpt2.modeling_gpt2  # noqa: F401

    return build


def train_by_hand(model, iters):
    """Train with PyTorch's FSDP2 alone, as its tutorial does: every rank builds the model."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group('gloo')
    build, notes = prepare(model), Notes(iters)
    before = memory('VmRSS')
    mesh = init_device_mesh('cpu', (torch.distributed.get_world_size(),))
    built = build()
    for part in list(built.modules()):
        if type(part).__name__.endswith(('GPT2Block', 'TransformerEncoderLayer')):
            fully_shard(part, mesh=mesh)
    fully_shard(built, mesh=mesh)
    optimizer = torch.optim.AdamW(built.parameters(), lr=1e-5, foreach=False)
    notes.watch(built, optimizer)
    most = memory('VmHWM') - before
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for number in range(iters):
        inputs = tokens_of(model, (rank + number * ranks) % 64)[None]
        built(inputs, mode='loss')['loss'].backward()
        optimizer.step()
        optimizer.zero_grad()
        notes.end_iteration()
    notes.show(before, most, bytes_of(built))
    torch.distributed.destroy_process_group()


def train(model, way, iters):
    """Train in this rank by DeviceRunner, and print its figures as JSON."""
    import torch
    from mmengine.config import Config
    from mmengine.hooks import Hook
    from mmengine.registry import DATASETS, MODELS, RUNNERS

    import mmdevplug  # noqa: F401

    MODELS.register_module(name='Measured', module=prepare(model))
    notes = Notes(iters)

    class Note(Hook):
        priority = 'LOWEST'

        def before_train(self, runner):
            notes.watch(runner.model, runner.optim_wrapper.optimizer)

        def after_train_iter(self, runner, *args, **kwargs):
            notes.end_iteration()

    @DATASETS.register_module()
    class MeasuredTokens(torch.utils.data.Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, index):
            return dict(inputs=tokens_of(model, index))

    cfg = Config(
        dict(
            model=dict(type='Measured'),
            work_dir=tempfile.mkdtemp(),
            launcher='pytorch',
            runner_type='DeviceRunner',
            accelerator=dict(type='cpu', backend='gloo', memory=False),
            train_dataloader=dict(
                batch_size=1,
                num_workers=0,
                dataset=dict(type='MeasuredTokens'),
                sampler=dict(type='DefaultSampler', shuffle=False),
                collate_fn=dict(type='default_collate'),
            ),
            train_cfg=dict(type='IterBasedTrainLoop', max_iters=iters),
            optim_wrapper=dict(
                type='OptimWrapper', optimizer=dict(type='AdamW', lr=1e-5, foreach=False)
            ),
            default_hooks=dict(checkpoint=None),
            log_level='ERROR',
            **(dict(sharding=True) if way == 'sharded' else {}),
        )
    )
    before = memory('VmRSS')
    runner = RUNNERS.build(cfg)
    runner.register_hook(Note())
    built = memory('VmHWM') - before
    runner.train()
    notes.show(before, built, bytes_of(runner.model))


def measure(model, way, nproc, iters):
    """Run one job and return the figures of its ranks, None if one ended, as without memory."""
    environ = dict(
        os.environ, OMP_NUM_THREADS='1', MASTER_ADDR='127.0.0.1', GLOO_SOCKET_IFNAME='lo'
    )
    environ.update(WORLD_SIZE=str(nproc), LOCAL_WORLD_SIZE=str(nproc))
    environ['MASTER_PORT'] = str(20000 + os.getpid() % 20000)
    command = [sys.executable, __file__, '--rank-of', model, way, '--iters', str(iters)]
    jobs = [
        subprocess.Popen(
            command,
            env=dict(environ, RANK=str(rank), LOCAL_RANK=str(rank)),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(nproc)
    ]
    lines = [job.communicate()[0].strip().splitlines() for job in jobs]
    if any(job.returncode for job in jobs):
        return None
    return [json.loads(line[-1]) for line in lines]


def main():
    """Measure every way and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--models', nargs='+', choices=MODELS, default=MODELS[:2])
    parser.add_argument('--ways', nargs='+', choices=WAYS, default=WAYS)
    parser.add_argument('--nproc', nargs='+', type=int, default=(2, 4))
    parser.add_argument('--iters', type=int, default=4)
    parser.add_argument('--json')
    parser.add_argument('--rank-of', nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        model, way = args.rank_of
        if way == 'fsdp2':
            train_by_hand(model, args.iters)
        else:
            train(model, way, args.iters)
        return
    rows = []
    for model in args.models:
        for nproc in args.nproc:
            for way in args.ways:
                ranks = measure(model, way, nproc, args.iters)
                if ranks is None:
                    print(f'{model}, {way}, {nproc} ranks: a rank ended, see above', flush=True)
                    continue
                peak = max(rank['peak'] for rank in ranks)
                others = [rank['peak'] for rank in ranks[1:]] or [peak]
                row = dict(
                    model=model,
                    way=way,
                    nproc=nproc,
                    peak_mb=round(peak),
                    peak_of_others_mb=round(max(others)),
                    tensors_mb=round(max(rank['tensors'] for rank in ranks)),
                    built_mb=round(max(rank['built'] for rank in ranks)),
                    seconds=round(ranks[0]['seconds'], 3),
                    cpu_seconds=round(sum(rank['cpu_seconds'] for rank in ranks) / nproc, 3),
                    sent_mb=round(ranks[0]['sent']),
                    weights_mb=round(ranks[0]['weights']),
                )
                rows.append(row)
                print(row, flush=True)
    if args.json:
        from result_file import write_results

        write_results(args.json, rows)


if __name__ == '__main__':
    main()
