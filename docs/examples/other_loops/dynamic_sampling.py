"""Learn from rewards, on groups of answers that are neither all right nor all wrong:
``torchrun --nproc-per-node 4 dynamic_sampling.py``."""

import os

import torch
from torch import nn

import mmdevplug.staged  # noqa: F401  registers the backend
from mmdevplug.accelerators import enter_rank_device, to_device
from mmdevplug.samples import DynamicSampler

ANSWERS = 8  # to each question, the size of a group
if 'WORLD_SIZE' in os.environ:
    torch.distributed.init_process_group('staged')
rank = int(os.environ.get('RANK', 0))
_, device = enter_rank_device()
torch.manual_seed(0)
policy = nn.Sequential(nn.Embedding(10, 32), nn.Tanh(), nn.Linear(32, 10)).to(device)
model = policy
if torch.distributed.is_initialized():
    model = nn.parallel.DistributedDataParallel(policy)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
torch.manual_seed(rank)


def generate():
    """Answer four questions several times; a sample is an answer with its reward."""
    questions = torch.randint(10, (4,))
    with torch.no_grad():
        chances = policy(questions.to(device)).softmax(1)
    answers = to_device(torch.multinomial(chances, ANSWERS, replacement=True), 'cpu')
    return [
        dict(
            question=question,
            answer=answer,
            reward=(answer == (3 * question + 1) % 10).float(),
            text=f'{int(question)}? {int(answer)}!',
        )
        for question, row in zip(questions, answers)
        for answer in row
    ]


def is_valid(group):
    return 0 < sum(float(sample['reward']) for sample in group) < len(group)


losses = []
sampler = DynamicSampler(
    generate, is_valid, target=64, max_resamples=3, per_group=ANSWERS, on_short='fewer'
)
for batch in sampler:  # this rank's slice of the 64, on its device; it ends when all is learnt
    rewards = batch['reward'].view(-1, ANSWERS)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True)
    chosen = model(batch['question']).log_softmax(1).gather(1, batch['answer'][:, None])
    loss = -(advantages.view(-1) * chosen[:, 0]).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
questions = torch.arange(10)
right = (policy(questions.to(device)).argmax(1).cpu() == (3 * questions + 1) % 10).sum()
if rank == 0:
    print(f'{sampler.last.pool} batches; {int(right)} of 10 right')
    print('losses', *[f'{loss:.6f}' for loss in losses])
