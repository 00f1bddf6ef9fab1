"""Compiled graphs kept on disk: what torch_xla's CPU client really does with them."""

import os

import pytest

from tests.ranks import RanksFailed, run_ranks
from tests.xla.shape_jobs import train
from tests.xla.test_gcu_t20 import with_standin

pytestmark = pytest.mark.xla


def train_keeping(work_dir, **accelerator):
    import logging
    import warnings

    from mmdevplug.accelerators import enter_rank_device

    told = []
    keep = logging.Handler()
    keep.emit = lambda record: told.append(record.getMessage())
    logging.getLogger('mmengine').addHandler(keep)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        result = train(work_dir, count=8, dataset=dict(sizes=[(12, 12)]), **accelerator)
    warned = [str(one.message) for one in caught if 'compilation_cache' in str(one.message)]
    kept = enter_rank_device()[0].compilation.kept_graphs()
    return result, warned, None if kept is None else tuple(kept)


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_cpu_client_writes_graphs_and_cannot_read_them(tmp_path):
    """Found out anew here: if it ever can, the numbers below change and so must the warning."""
    folder = tmp_path / 'kept'
    runs = [
        run_ranks(keep_in, 2, tmp_path / 'run', str(folder), environ=dict(CPU_NUM_DEVICES='2'))
        for _ in range(2)
    ]
    assert files(folder) == ['rank_0', 'rank_1']
    for rank in (0, 1):
        first, again = (run[rank] for run in runs)
        assert first[2][0] == str(folder / f'rank_{rank}')
        assert first[2][1] == 0
        assert first[2][2] == len(files(folder / f'rank_{rank}')) > 0
        assert first[2][3] == 0
        _, read, missed, unreadable = again[2]
        assert (read, missed) == (0, 0)
        assert unreadable == first[2][2]
        assert again[0]['counts'][-1] == first[0]['counts'][-1]  # all compiled again
    (warned,) = runs[0][0][1]
    assert 'cannot read them' in warned
    assert runs[0][1][1] == []  # one voice is enough


def keep_in(work_dir, folder):
    return train_keeping(work_dir, compilation_cache=folder)


def keep_in_work_dir(work_dir):
    return train_keeping(work_dir, compilation_cache=True)


def test_true_is_the_work_directory_and_the_log_says_what_was_kept(tmp_path):
    run_ranks(keep_in_work_dir, 0, tmp_path, environ=dict(CPU_NUM_DEVICES='1'))
    assert files(tmp_path / 'compilation_cache') == ['rank_0']
    (log,) = tmp_path.glob('*/*.log')
    assert 'graphs read' in log.read_text()


def test_a_folder_that_cannot_be_made_ends_all_ranks(tmp_path):
    (tmp_path / 'file').write_text('')
    with pytest.raises(RanksFailed, match=r'accelerator\.compilation_cache=') as raised:
        run_ranks(
            keep_in,
            2,
            tmp_path,
            str(tmp_path / 'file'),
            environ=dict(CPU_NUM_DEVICES='2'),
            together=True,
        )
    assert set(raised.value.errors) == {0, 1}


def keep_on(work_dir, kind):
    return train_keeping(work_dir, kind=kind, compilation_cache=os.path.join(work_dir, 'kept'))


@pytest.mark.parametrize(
    ('kind', 'why'), [('cpu', "'cpu' offers no cache"), ('gcu', "'gcu' offers no cache")]
)
def test_where_nothing_can_be_kept_a_warning_says_so(tmp_path, kind, why):
    variables = dict(TOPS_VISIBLE_DEVICES='0')
    (((_, (warned,), kept), _),) = run_ranks(
        with_standin, 0, keep_on, str(tmp_path), kind, environ=variables
    )
    assert why in warned
    assert kept is None


@pytest.mark.parametrize('option', [5, '', ['a']])
def test_other_values_are_refused(option):
    from mmdevplug.config.accelerator import find_compilation_cache
    from mmdevplug.errors import AcceleratorError

    with pytest.raises(AcceleratorError, match='expected a folder, or True'):
        find_compilation_cache(option, '/work_dir')
    with pytest.raises(AcceleratorError, match='expected a folder\\.'):
        find_compilation_cache(True)
