"""What an exchange of samples puts on the wire, counted by interfaces of network namespaces."""

import torch
from torch import distributed as torch_dist

from benchmarks.hosts import Hosts, counter_file
from mmdevplug import init_device
from mmdevplug.samples import balance_samples
from tests.on_hosts import need_hosts, run_on_hosts

SAMPLE_BYTES = 64 << 10
EXCHANGES = 8
#: TCP's headers and acknowledgements, what a rank says first, and headers.
OVERHEAD = 1.1
#: Bytes of an exchange in which nothing but the numbers of samples travels.
TALK = 8 << 10


def work(counts_of_exchanges):
    """A rank on a host of its own: balance, and count what its host sends."""
    context = init_device('pytorch', 'cpu', timeout=60)
    rank = context.env.rank

    def bytes_sent():
        torch_dist.barrier()
        with open(counter_file('tx')) as file:
            found = int(file.read())
        # Nobody sends anything before all have looked.
        torch_dist.barrier()
        return found

    found = []
    for counts in counts_of_exchanges:
        held = [dict(x=torch.randn(SAMPLE_BYTES // 4), name='a')] * counts[rank]
        balance_samples(held)
        before = bytes_sent()
        for _ in range(EXCHANGES):
            balance_samples(held)
        found.append((bytes_sent() - before) / EXCHANGES)
    torch_dist.barrier()
    return found


def test_only_what_changes_rank_travels():
    need_hosts()
    ranks = 3
    settings = [[12] + [0] * (ranks - 1), [0] * (ranks - 1) + [12], [4] * ranks]
    with Hosts(ranks) as hosts:
        sent = run_on_hosts(work, 1, hosts, settings, timeout=120)
    share = 12 // ranks * SAMPLE_BYTES
    for rank, (from_first, from_last, even) in enumerate(sent):
        leaving = [share * (ranks - 1) if rank == 0 else 0]
        leaving.append(share * (ranks - 1) if rank == ranks - 1 else 0)
        for found, needed in zip((from_first, from_last), leaving):
            assert needed <= found <= OVERHEAD * needed + TALK * ranks
        assert even <= TALK * ranks
    assert sum(found[0] for found in sent) <= OVERHEAD * share * (ranks - 1)
