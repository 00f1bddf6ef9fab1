"""What a sampler decides, in one process."""

import re

import numpy as np
import pytest
import torch

from mmdevplug.errors import SampleError
from mmdevplug.samples import DynamicSampler, sampler as module
from mmdevplug.samples.rounds import FULL, GO_ON, SHORT, Pool, Tally, decide, too_few
from tests.jobs import load_file


class Source:
    """Generates numbered samples; in each round those with the numbers given are valid."""

    def __init__(self, *rounds, size=8, repeat=False):
        self.rounds, self.size, self.repeat = list(rounds), size, repeat
        self.calls = 0

    def generate(self):
        if self.calls >= len(self.rounds) and not self.repeat:
            raise StopIteration
        valid = self.rounds[self.calls % len(self.rounds)]
        self.calls += 1
        return [
            dict(number=torch.tensor(100 * self.calls + i), valid=i < valid)
            for i in range(self.size)
        ]

    @staticmethod
    def is_valid(sample):
        return sample['valid']

    def sampler(self, target=8, **options):
        return DynamicSampler(self.generate, self.is_valid, target, **options)


@pytest.fixture
def log(monkeypatch):
    """The lines that are logged."""
    lines = []
    monkeypatch.setattr(module, 'log', lambda line, *_: lines.append(line))
    return lines


def numbers(batch):
    return batch['number'].tolist()


def test_it_draws_until_there_are_enough_and_keeps_the_rest():
    sampler = Source(5, 5, 7, 0).sampler()
    assert numbers(next(sampler)) == [100, 101, 102, 103, 104, 200, 201, 202]
    report = sampler.last
    assert (report.resamples, report.generated, report.valid) == (1, 16, 10)
    assert (report.samples, report.surplus, report.slice) == (8, 2, (0, 8))
    assert report.kept == 10 / 16
    assert numbers(next(sampler)) == [203, 204, 300, 301, 302, 303, 304, 305]
    assert (sampler.last.resamples, sampler.last.reused, sampler.last.surplus) == (0, 2, 1)


def test_a_surplus_that_suffices_is_used_without_drawing():
    source = Source(8, 8, size=8)
    sampler = source.sampler(target=3)
    assert [numbers(next(sampler))[0] for _ in range(2)] == [100, 103]
    assert source.calls == 1
    assert sampler.last.generated == 0
    assert sampler.last.kept == 0.0


def test_groups_stay_whole():
    source = Source(8, 8)

    def valid(group):
        return all(int(sample['number']) % 8 < 4 for sample in group)

    sampler = DynamicSampler(source.generate, valid, 8, per_group=4, on_short='fewer')
    # 100 to 103 are 4 to 7 modulo 8, and 200 to 203 are 0 to 3.
    assert numbers(next(sampler)) == [104, 105, 106, 107, 200, 201, 202, 203]


def test_samples_come_to_the_host_before_they_are_judged():
    seen = []

    def is_valid(sample):
        seen.append(sample['x'].device.type)
        return True

    sampler = DynamicSampler(lambda: [dict(x=torch.ones(2))] * 2, is_valid, 2)
    assert next(sampler)['x'].shape == (2, 2)
    assert seen == ['cpu', 'cpu']


# too few ---------------------------------------------------------------------------------------


def test_too_few_after_all_resamples_is_an_error():
    sampler = Source(2, repeat=True).sampler(max_resamples=2)
    with pytest.raises(SampleError) as raised:
        next(sampler)
    message = str(raised.value)
    assert '6 of target=8 samples, 2 too few, after 2 resample(s) of max_resamples=2' in message
    assert 'rank 0: 6' in message
    assert 'no data have ended' in message
    assert "on_short='fewer'" in message
    # What was found is not lost.
    assert numbers(next(sampler)) == [100, 101, 200, 201, 300, 301, 400, 401]


def test_fewer():
    sampler = Source(3, 0, repeat=True).sampler(max_resamples=1, on_short='fewer')
    assert numbers(next(sampler)) == [100, 101, 102]
    assert sampler.last.short == 'fewer'
    assert sampler.last.samples == 3


def test_fewer_than_one_for_each_ends():
    assert list(Source(0, repeat=True).sampler(on_short='fewer')) == []


@pytest.mark.parametrize(
    ('on_short', 'sizes', 'told'), [('error', [8], '5 valid'), ('fewer', [8, 5], None)]
)
def test_the_end_of_the_data(on_short, sizes, told, log):
    sampler = Source(8, 5).sampler(on_short=on_short)
    assert [len(batch['number']) for batch in sampler] == sizes
    assert next(sampler, None) is None
    dropped = [line for line in log if 'are dropped' in line]
    assert len(dropped) == (told is not None)
    assert told is None or told in dropped[0]


def test_no_data_at_all_is_an_error():
    with pytest.raises(SampleError, match='the data of all ranks have ended'):
        next(Source().sampler())


def test_another_pass_over_the_data():
    source = Source(8, 8)
    sampler = source.sampler()
    assert len(list(sampler)) == 2
    assert list(source.sampler(on_short='fewer')) == []
    source.calls = 0
    assert len(list(sampler)) == 2


# what all ranks decide -------------------------------------------------------------------------

FOUR = Pool(64, 8, 3, 'error')


@pytest.mark.parametrize(
    ('new', 'ended', 'rounds', 'expected'),
    [
        ([1, 2, 2, 2], [False] * 4, 1, GO_ON),
        ([2, 2, 2, 2], [False] * 4, 1, FULL),
        # One rank alone has all of them.
        ([0, 0, 8, 0], [False] * 4, 1, FULL),
        # Rank 0 has more than its share, which is no reason to stop.
        ([3, 1, 2, 1], [False] * 4, 1, GO_ON),
        ([3, 1, 2, 1], [True, True, False, True], 2, GO_ON),
        ([3, 1, 2, 1], [True] * 4, 2, SHORT),
        ([3, 1, 2, 1], [False] * 4, 3, GO_ON),
        ([3, 1, 2, 1], [False] * 4, 4, SHORT),
        ([3, 3, 2, 1], [True] * 4, 4, FULL),
    ],
)
def test_the_sum_decides(new, ended, rounds, expected):
    assert decide(Tally([0] * 4, new, ended, rounds), FOUR) == expected


def test_what_was_left_over_opens_the_pool():
    tally = Tally([0, 0, 0, 5], [4, 4, 4, 4], [False] * 4)
    offered = tally.offers(8)
    assert offered == [3, 0, 0, 5]
    left = tally.after(offered)
    assert (left.old, left.new) == ([1, 4, 4, 4], [0] * 4)
    assert left.offers(8) == [1, 4, 3, 0]


def test_the_error_names_who_was_short():
    tally = Tally([0, 1, 0, 0], [2, 0, 0, 1], [False, True, False, True], 4, 20)
    message = str(too_few(tally, FOUR))
    assert '32 of target=64 samples, 32 too few' in message
    assert 'rank 0: 16, rank 1: 8, rank 2: 0, rank 3: 8' in message
    assert 'the data of rank(s) 1, 3 have ended' in message
    assert '160 samples were generated and 24 of them valid' in message


# bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('options', 'told'),
    [
        (dict(target=10, per_group=4), 'per_group=4 cannot be shared evenly by 1 rank(s)'),
        (dict(target=0), 'target=0: expected a whole number of at least 1'),
        (dict(target=8.0), 'target=8.0: expected a whole number'),
        (dict(target=True), 'target=True'),
        (dict(per_group=0), 'per_group=0'),
        (dict(max_resamples=-1), 'max_resamples=-1: expected a whole number of at least 0'),
        (dict(on_short='wait'), "on_short='wait': expected 'error' or 'fewer'"),
        (dict(generate=[1]), r'generate=[1]: expected a function'),
        (dict(is_valid=None), 'is_valid=None: expected a function'),
        (dict(collate='pad'), "collate='pad': expected None, 'stack'"),
    ],
)
def test_arguments_that_do_not_work(options, told):
    arguments = dict(generate=list, is_valid=bool, target=8)
    with pytest.raises(SampleError, match=re.escape(told)):
        DynamicSampler(**dict(arguments, **options))


def stop(*_):
    raise StopIteration


@pytest.mark.parametrize(
    ('function', 'does', 'told'),
    [
        ('generate', lambda: dict(x=1), 'returned a dict; expected a list of samples'),
        ('generate', lambda: None, 'returned a NoneType'),
        ('generate', lambda: [1, 2, 3], 'returned 3 samples, which is no multiple of per_group=2'),
        ('is_valid', lambda group: None, 'returned None (NoneType) for group 0'),
        ('is_valid', lambda group: 1, 'returned 1 (int)'),
        ('is_valid', lambda group: torch.tensor([True, False]), 'returned values of shape (2,)'),
        ('is_valid', lambda group: torch.tensor(0.5), 'dtype torch.float32'),
        ('is_valid', lambda group: 'no', "returned 'no' (str)"),
        ('is_valid', stop, 'raised StopIteration'),  # which is no end of the data
        ('collate', stop, 'collate() raised StopIteration'),
        ('collate', lambda samples: None, 'collate() returned None; expected a batch'),
    ],
)
def test_what_functions_must_not_do(function, does, told):
    functions = dict(generate=lambda: [1, 2], is_valid=lambda group: True)
    functions[function] = does
    with pytest.raises(SampleError, match=re.escape(told)):
        next(DynamicSampler(target=2, per_group=2, **functions))


@pytest.mark.parametrize(
    'found', [True, np.bool_(True), torch.tensor(True), torch.tensor([[True]]), np.array([True])]
)
def test_what_is_valid_may_return(found):
    assert next(DynamicSampler(lambda: [1, 2], lambda sample: found, 2)).tolist() == [1, 2]


def test_rounds_are_logged_every_few_pools(log, monkeypatch):
    monkeypatch.setattr(module, 'LOG_INTERVAL', 2)
    sampler = Source(5, 8, repeat=True).sampler()
    for _ in range(3):
        next(sampler)
    assert log[:2] == ['Sampling, pool 1: initial: 5/8', 'Sampling, pool 1: resample 1: 13/8']
    assert 'ranks take [0:8] of 8 samples after 1 resample(s); 5 valid' in log[2]
    assert not any('pool 2' in line for line in log)
    assert any('pool 3' in line for line in log)


def test_going_on_from_a_state(tmp_path):
    sampler = Source(5, 8, 8).sampler()
    next(sampler)
    torch.save(sampler.state_dict(), str(tmp_path / 'state.pth'))
    other = Source(8).sampler()
    other.load_state_dict(load_file(str(tmp_path / 'state.pth'), True))
    assert numbers(next(other)) == [203, 204, 205, 206, 207, 100, 101, 102]
    assert other.last.pool == 2
    assert other.last.reused == 5
    both = Source().sampler()  # on one rank in place of two
    both.load_state_dict(sampler.state_dict(), sampler.state_dict())
    assert numbers(next(both)) == [203, 204, 205, 206, 207, 203, 204, 205]


RAGGED = [
    dict(
        prompt_ids=[1] * (1 + n),
        same_length=[n, n],
        completion=torch.arange(n),
        image=torch.full((2,), float(n)),
        turns=[torch.ones(1)] * (1 + n % 2),
        nested=dict(mask=torch.ones(n), text='a' * n, pair=(n, [n] * n)),
        reward=n / 2,
        note=None if n else 'first',
        array=np.zeros(n),
    )
    for n in range(4)
]


def test_ragged_samples_become_lists_beside_stacked_tensors():
    batch = next(DynamicSampler(lambda: RAGGED, lambda sample: True, 4))
    assert batch['prompt_ids'] == [[1], [1, 1], [1, 1, 1], [1, 1, 1, 1]]
    assert batch['same_length'] == [[0, 0], [1, 1], [2, 2], [3, 3]]
    assert [each.tolist() for each in batch['completion']] == [[], [0], [0, 1], [0, 1, 2]]
    assert batch['image'].shape == (4, 2)
    assert [len(each) for each in batch['turns']] == [1, 2, 1, 2]
    assert [len(each) for each in batch['nested']['mask']] == [0, 1, 2, 3]
    assert batch['nested']['text'] == ['', 'a', 'aa', 'aaa']
    assert batch['nested']['pair'][0].tolist() == [0, 1, 2, 3]
    assert batch['nested']['pair'][1] == [[], [1], [2, 2], [3, 3, 3]]
    assert batch['reward'].tolist() == [0.0, 0.5, 1.0, 1.5]
    assert batch['note'] == ['first', None, None, None]
    assert [each.shape for each in batch['array']] == [(0,), (1,), (2,), (3,)]


def test_ragged_surplus_is_kept_and_resumed(tmp_path):
    expected = DynamicSampler(lambda: RAGGED, lambda sample: True, 3)
    next(expected)
    state = expected.state_dict()
    again = DynamicSampler(lambda: RAGGED, lambda sample: True, 3)
    torch.save(state, str(tmp_path / 'state.pth'))
    again.load_state_dict(load_file(str(tmp_path / 'state.pth'), True))
    for sampler in (expected, again):
        batch = next(sampler)
        assert batch['prompt_ids'] == [[1, 1, 1, 1], [1], [1, 1]]
        assert [each.tolist() for each in batch['completion']] == [[0, 1, 2], [], [0]]
        assert (sampler.last.pool, sampler.last.reused, sampler.last.surplus) == (2, 1, 2)


def pad(samples, value=0):
    """Pad token ids to one length."""
    most = max(len(sample['prompt_ids']) for sample in samples)
    rows = [
        sample['prompt_ids'] + [value] * (most - len(sample['prompt_ids'])) for sample in samples
    ]
    return torch.tensor(rows)


def test_a_function_makes_the_batch():
    batch = next(DynamicSampler(lambda: RAGGED[:3], lambda sample: True, 3, collate=pad))
    assert batch.tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_samples_may_stay_a_list_or_must_be_stacked():
    listed = next(DynamicSampler(lambda: RAGGED, lambda sample: True, 4, collate='list'))
    assert [sample['prompt_ids'] for sample in listed] == [s['prompt_ids'] for s in RAGGED]
    stacked = DynamicSampler(lambda: RAGGED, lambda sample: True, 4, collate='stack')
    with pytest.raises(SampleError, match=r"\['prompt_ids'\]: sample 1 has 2 items.*collate=None"):
        next(stacked)


@pytest.mark.parametrize('value', [2**70, np.array(['a', 'b']), np.str_('a')])
def test_what_pytorch_has_no_dtype_for_stays_a_list(value):
    (batch,) = next(DynamicSampler(lambda: [(value,), (value,)], lambda sample: True, 2))
    assert type(batch) is list
    assert len(batch) == 2


def test_a_state_with_large_samples():
    images = torch.rand(3, 300, 300)
    sampler = DynamicSampler(lambda: [dict(image=x) for x in images], lambda sample: True, 1)
    next(sampler)
    other = DynamicSampler(list, bool, 2)
    other.load_state_dict(sampler.state_dict())
    assert torch.equal(next(other)['image'], images[1:])


def test_a_resumed_pool_has_as_many_rounds_as_another():
    sampler, resumed = (
        DynamicSampler(lambda: [0.0, 1.0], lambda _: True, target=2, max_resamples=0)
        for _ in range(2)
    )
    resumed.load_state_dict(sampler.state_dict())
    assert next(resumed).tolist() == [0.0, 1.0]
    assert resumed.last.resamples == 0
