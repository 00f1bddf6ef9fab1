"""What the facts of each row have to be: of MMEngine by itself, and with ours."""

from docs.sites.devices import VISIBLE, device_type
from mmdevplug.utils.broken_imports import distribution
from tests.columns import NATIVE, NATIVE_BACKENDS
from tests.jobs import torch_before

STAGED_NAMES = dict(xla='xla 0,1', gcu='xla 0,1', zeta='zeta 0,1,2,3', npu='npu 0,1,2,3')
TRAIN_ITERATIONS = 6  # 2 epochs of 3


def device_of(name, rank):
    return 'cpu' if name == 'cpu' else f'{device_type(name)}:{rank}'


def raises(facts, *kinds):
    assert isinstance(facts, dict), facts
    assert facts.get('error') in kinds, facts


def lacks_cuda(facts):
    raises(facts, 'AttributeError', 'RuntimeError', 'AssertionError')
    assert 'cuda' in facts['message'].lower(), facts


def refuses_device_ids(facts):
    raises(facts, 'ValueError')
    assert 'device_ids' in facts['message']


def _stock_4(facts, name, rank):
    lacks_cuda(facts['mpi'])
    raises(facts['slurm'], 'ZeroDivisionError')


def _stock_5(facts, name, rank):
    raises(facts, 'RuntimeError')
    assert 'cpu' in facts['message']


def _stock_3(facts, name, rank):
    if name == NATIVE:
        assert facts == dict(asked='gloo', backend='hccl'), facts
        return
    raises(facts, 'AssertionError', 'ValueError', 'RuntimeError')
    assert 'hccl' in facts['message'].lower(), facts


def _stock_9(facts, name, rank):
    assert facts['broadcasts'] >= 9
    if device_type(name) == 'xla':
        assert facts['executions'] >= 5


def _stock_11(facts, name, rank):
    # torch.load before 2.6, and OneDL's MMEngine, unpickle whatever a file says.
    if torch_before('2.6.0') or distribution('mmengine') == 'onedl-mmengine':
        assert isinstance(facts['resumed'], int)
    else:
        raises(facts['resumed'], 'UnpicklingError')
    assert facts['downloaded']['ran']


def _stock_14(facts, name, rank):
    lacks_cuda(facts['cuda'])
    if name == 'zeta':
        assert (facts['parameters'], facts['vendor']) == (f'zeta:{rank}', 'cpu')


def _stock_15(facts, name, rank):
    raises(facts['wrapper'], 'AssertionError')
    if name != 'cpu':
        raises(facts['context'], 'ValueError')


def _stock_20(facts, name, rank):
    assert facts == 0


def _stock_21(facts, name, rank):
    assert not any(line.startswith(STAGED_NAMES[name]) for line in facts)


def _stock_25(facts, name, rank):
    # One for each sample that is read, of a batch of 4.
    assert facts == dict(device='cpu', executions=4 * (device_type(name) == 'xla')), facts


def _equals(value):
    def check(facts, name, rank):
        assert facts == value, facts

    return check


STOCK = {
    1: _equals('cpu'),
    2: lambda facts, name, rank: lacks_cuda(facts),
    3: _stock_3,
    4: _stock_4,
    5: _stock_5,
    6: _stock_5,
    7: _equals('cpu'),
    8: lambda facts, name, rank: refuses_device_ids(facts),
    9: _stock_9,
    10: _equals('cpu'),
    11: _stock_11,
    13: _equals('cpu'),
    14: _stock_14,
    15: _stock_15,
    16: _equals(0),
    17: _equals(False),
    18: _equals(False),
    19: lambda facts, name, rank: _equals(rank)(facts, name, rank),
    20: _stock_20,
    21: _stock_21,
    22: lambda facts, name, rank: raises(facts, 'AssertionError'),
    23: _equals(['CPU', 'CUDA']),
    24: lambda facts, name, rank: raises(facts, 'ValueError', 'NotImplementedError'),
    25: _stock_25,
    26: _equals(3),
}


def _native_2(facts, name, rank):
    assert facts == dict(
        backend=NATIVE_BACKENDS.get(name, 'gloo'), device=device_of(name, rank)
    ), facts


def _native_5(facts, name, rank):
    device = device_of(name, rank)
    assert facts == [2.0, 2.0, device, device], facts


def _native_13(facts, name, rank):
    raises(facts, 'AttributeError')
    assert 'native_device' in facts['message'], facts


def _native_14(facts, name, rank):
    device = device_of(name, rank)
    assert facts['to'] == facts['parameters'] == device, facts
    assert facts['vendor'] in (device, str(rank)), facts  # MMEngine's `npu()` keeps the index


def _native_24(facts, name, rank):
    assert [len(row) for row in facts] == [2, 2, 2], facts


def _native_25(facts, name, rank):
    assert facts == dict(device=device_of(name, rank), executions=0), facts


def _ours_2(facts, name, rank):
    backend = 'gloo' if name in ('cpu', 'cuda') else 'staged'
    expected = dict(backend=NATIVE_BACKENDS.get(name, backend), device=device_of(name, rank))
    assert facts == expected, facts


def _ours_3(facts, name, rank):
    card = f'npu:{rank}'
    assert facts == dict(backend='staged', device=card, sums=[2.0, 2.0, card, 'cpu']), facts


def _ours_4(facts, name, rank):
    device = device_of(name, rank)
    assert facts == dict(mpi=device, slurm=device), facts


def _ours_5(facts, name, rank):
    # In the column of the native stand-in with the backend that MMEngine knows, and with another
    # one, beside which gloo takes host tensors.
    carried_on = f'npu:{rank}' if name == NATIVE else 'cpu'
    assert facts == [2.0, 2.0, f'npu:{rank}', carried_on], facts


def _ours_6(facts, name, rank):
    assert facts['broadcast'] == [dict(of=0)], facts
    assert facts['gathered'] == [0, 1]
    assert facts['collected'] == ([0, 1] if rank == 0 else None)


def _ours_8(facts, name, rank):
    assert facts == dict(ids=None, iterations=TRAIN_ITERATIONS), facts


def _ours_9(facts, name, rank):
    assert facts['ours']['broadcasts'] == 1 < facts['tensors'], facts
    assert facts['ours']['executions'] <= 1


def _ours_11(facts, name, rank):
    assert facts['resumed'] == 3
    assert 'state_dict' in facts['loaded']
    assert not facts['downloaded']['ran']
    raises(facts['downloaded']['said'], 'CheckpointError')


def _ours_16(facts, name, rank):
    # In each of 2 epochs, 3 iterations of training and 3 of validation, and once around each.
    assert facts == 2 * 2 * (1 + 3 + 1), facts


def _ours_19(facts, name, rank):
    assert len(facts) == 2
    for number, file in enumerate(facts):
        assert f'device{6 + number}_rank{number}' in file, facts


def _ours_20(facts, name, rank):
    waits = [one['waits'] for one in facts]
    # The log is written every second iteration of an epoch and at its end. ProfilerHook waits in
    # the second iteration, too.
    assert waits[1] >= 1
    assert [waits[0], *waits[2:]] == [0, 1, 0, 1, 1], waits
    assert len({one['executions'] for one in facts[1:]}) == 1, facts


def _ours_21(facts, name, rank):
    assert any(line.startswith(STAGED_NAMES[name]) for line in facts), facts
    package = '' if name == 'zeta' else f'torch_{name}: '
    wanted = 'CPU_NUM_DEVICES: 2' if name == 'xla' else f'{VISIBLE[name]}: 6,7'
    assert any(line.startswith(package) for line in facts), facts
    assert wanted in facts, facts


def _ours_22(facts, name, rank):
    assert facts['mask'] == [[0.0, 2.0], ['a', 'c']], facts
    assert facts['indices'] == [[3.0, 1.0], ['d', 'b']]
    assert facts['device'] == device_of(name, rank)
    raises(facts['wrong'], 'AssertionError')


def _ours_23(facts, name, rank):
    if name == 'xla':
        assert facts['traces'] == 1, facts
        assert facts['activities'] == ['CPU']
    else:
        assert facts['recorded'] == name, facts
    assert not facts['warned']


def _ours_24(facts, name, rank):
    assert facts['batches'] == TRAIN_ITERATIONS
    assert any(abs(value) > 1e-3 for value in facts['mean'])


def _ours_25(facts, name, rank):
    views = facts['tta']
    assert facts['device'] == device_of(name, rank), facts
    assert facts['difference'] <= 1e-5
    if rank == 0:  # the one that MMEngine computes metrics on
        assert views['difference'] <= 1e-5
    if device_type(name) == 'xla':
        assert facts['executions'] == 1
        assert views['executions'] == [3, 3, 3]  # two views, and what they are merged to


def _is_device(facts, name, rank):
    assert facts == device_of(name, rank), facts


def _are_device(facts, name, rank):
    assert facts == [device_of(name, rank)], facts


#: Of MMEngine by itself on devices and backends that it knows by name: rows where it is right.
NATIVE_STOCK = {
    1: _equals(NATIVE),
    2: _native_2,
    5: _native_5,
    6: lambda facts, name, rank: _ours_6(facts, name, rank),
    7: _is_device,
    8: _is_device,
    10: _equals(NATIVE),
    13: _native_13,
    14: _native_14,
    15: _equals(dict(wrapper=None, context='torch.float16')),
    18: _equals(True),
    22: _equals([0.0, 2.0]),
    24: _native_24,
    25: _native_25,
}


def stock_check(number, name):
    """What MMEngine by itself has to have done."""
    return (NATIVE_STOCK if name == NATIVE else {}).get(number, STOCK[number])


OURS = {
    1: lambda facts, name, rank: _equals(device_type(name))(facts, name, rank),
    2: _ours_2,
    3: _ours_3,
    4: _ours_4,
    5: _ours_5,
    6: _ours_6,
    7: _is_device,
    8: _ours_8,
    9: _ours_9,
    10: _are_device,
    11: _ours_11,
    13: _are_device,
    14: _is_device,
    15: _equals(['torch.bfloat16'] * 2),
    16: _ours_16,
    17: _equals(True),
    18: _equals(True),
    19: _ours_19,
    20: _ours_20,
    21: _ours_21,
    22: _ours_22,
    23: _ours_23,
    24: _ours_24,
    25: _ours_25,
    26: _equals(dict(graph=1, reading=0)),
}
