"""The tables of figures: they are what the files say, and all of a run are of one commit."""

import importlib
import json
import re
import subprocess
import sys

import pytest

from tests.jobs import ROOT

DOCS = ROOT / 'docs'
LANGUAGES = ('en', 'zh_cn')
COMMIT = re.compile(r'(?:commit|提交) [0-9a-f]{7,8}\b')
HOME = dict(command='python x.py', commit='0123abcd', torch='2.13.0', cores=2, quick=False)
#: A row of each file, whose figures are invented.
FLOOR = dict(compute=1.0, to_host=0.0, to_device=0.0, wire=2.0, wire_between_hosts=2.0)
MS = dict(none=1.0, stock=4.0, accelerate=4.5, naive=9.0, ours=3.5)
GRAD_SYNC = dict(median_ms=MS, floor=FLOOR, floor_ms=3.0, ranks=2, bytes=48 << 20, device='cpu')
LOOP = dict(
    model='segformer',
    ranks=2,
    share=0.001,
    ms={'mmengine': 30.0, 'ours': 29.0, 'ours-bare': 28.0},
    hooks_ms={'mmengine': 0.3, 'ours': 0.5, 'ours-bare': 0.2},
)
JOB = dict(descriptors=26, memory_mb=178, writes=0.5, reads=2.8, sent_kb=3.1)
SHARDED = dict(way='sharded', nproc=2, tensors_mb=240, peak_mb=380, seconds=0.8, sent_mb=305)
STAGED = dict(ranks=2, bytes=1 << 20, median_ms=dict(gloo=2.0, staged=1.0))
SAVED = dict(megabytes=10, stall_ms=dict(mmengine=17.0, ours=20.0, background=4.0))
TRAINED = dict(ms=50.0, loss_ms=5.0, executions=4, compilations=0, differences=[1e-7], limit=20)
ROWS = dict(
    import_time=[dict(mmdevplug_s=0.02)],
    device_guard=[dict(name='CNN', slower=[0.012])],
    grad_sync_cpu=[GRAD_SYNC],
    grad_sync_card=[dict(GRAD_SYNC, device='card', median_ms=dict(none=1.0, naive=9.0, ours=3.0))],
    grad_sync_native=[dict(GRAD_SYNC, device='native')],
    grad_sync_xla=[
        dict(GRAD_SYNC, device='xla', median_ms=dict(none=1.0, split=1.5, naive=9.0, ours=5.0))
    ],
    checkpoint_cpu=[dict(SAVED, device='cpu')],
    checkpoint_xla=[dict(SAVED, device='xla')],
    exchange=[
        dict(exchange=exchange, pool=pool, ranks=2, samples=16, bytes=4, ms=ms)
        for exchange in ('gather', 'balance')
        for pool in ('even', 'skewed')
        for ms in [dict(object=5.0, flat=1.0, ours=1.1)]
    ],
    start_time=[
        dict(kind=kind, nproc=2, first_iteration=5.0, end=9.0, cpu=10.0, memory_mb=400.0)
        for kind in ('MMEngine', 'mmdevplug')
    ],
    scale=[
        dict(JOB, kind=kind, nproc=2, first_iteration=5.2) for kind in ('mmdevplug', 'MMEngine')
    ],
    scale_96=[dict(JOB, kind='mmdevplug', nproc=96, first_iteration=133.0)],
    training_loop=[LOOP],
    training_loop_xla=[LOOP],
    sync_bn=[
        dict(
            model='resnet50',
            layers=53,
            ms=dict(exact=730.0, per_rank=380.0),
            executions=dict(exact=108, per_rank=2),
        )
    ],
    sharding_small=[dict(SHARDED, model='gpt2-tiny', weights_mb=104)],
    sharding_large=[dict(SHARDED, model='gpt2-medium', way='fsdp2', weights_mb=1350)],
    staged_cpu=[STAGED],
    staged_card=[STAGED],
    llama_lora=[
        dict(trained=name, option=option, bits={'100': 3.5, '200': 2.5 + len(name)})
        for name, option in (('adapters', 'a.b=None'), ('ends', 'c=0'), ('both', ''))
    ],
    spmd=[
        dict(model='mlp', way=way, chips=2, ms=58.0, peak_mb=1300)
        for way in ('one', 'ranks', 'spmd', 'spmd, whole weights')
    ],
    host_losses=[
        dict(model='fcos', cpu=TRAINED, auto=TRAINED, device=dict(limit=20)),
        dict(model='detr', cpu=TRAINED, auto=TRAINED, device=TRAINED),
        dict(model='gfl', cpu=TRAINED, auto=dict(error='killed')),
    ],
    placement=[
        dict(model='M', devices=count, equal=True, accelerate=0.2, ours=0.1, best=0.1)
        for count in (2, 3, 4, 8)
    ],
)


@pytest.fixture
def pages(monkeypatch):
    """The script that fills the pages."""
    monkeypatch.syspath_prepend(str(DOCS))
    yield importlib.import_module('benchmark_pages')
    for module in ('benchmark_pages', 'benchmark_tables', 'tables', 'placement_tables'):
        sys.modules.pop(module, None)


@pytest.fixture
def run_all(monkeypatch):
    """The script that measures."""
    monkeypatch.syspath_prepend(str(ROOT / 'benchmarks'))
    yield importlib.import_module('run_all')
    for module in ('run_all', 'result_file'):
        sys.modules.pop(module, None)


def invented(**commits):
    """A file for each table."""
    files = {name: dict(HOME, rows=rows) for name, rows in ROWS.items()}
    files['staged_card'] = dict(files['staged_card'], device='card')
    files['staged_cpu'] = dict(files['staged_cpu'], device='cpu')
    files['placement'].update(
        times=[dict(devices=2, equal=True, search=2.5, plan=54.0, accelerate=368.0)],
        example=[
            dict(name='auto', counts=[9, 13], by_count=0.2, score=0.2, loads=[9.1], by_bytes=0.1)
        ],
    )
    for name, commit in commits.items():
        files[name] = dict(files[name], commit=commit)
    return files


def texts(language, pages):
    return {
        page: (DOCS / language / f'{page}.md').read_text(encoding='utf-8') for page in pages.PAGES
    }


def problems_of(pages, files):
    """What makes files unfit for pages."""
    commits = pages.commits_of(files)
    found = [f'several commits: {commits}'] if len(commits) > 1 else []
    found += [f'{name}: +' for name, one in files.items() if one['commit'].endswith('+')]
    return found + [f'{name}: quick' for name, one in files.items() if one.get('quick')]


# the pages of today ---------------------------------------------------------------------------


def test_all_files_are_of_one_commit(pages):
    assert problems_of(pages, pages.read_files(DOCS / 'benchmarks')) == []


def test_pages_are_made_of_the_files(pages):
    for path, made in pages.make_pages(DOCS, pages.read_files(DOCS / 'benchmarks')).items():
        assert path.read_text(encoding='utf-8') == made, 'run python docs/benchmark_pages.py'


@pytest.mark.parametrize('language', LANGUAGES)
def test_a_table_without_file_says_that_it_is_older_and_is_listed(pages, language):
    files, written = pages.read_files(DOCS / 'benchmarks'), texts(language, pages)
    listed = pages.blocks_in(written['benchmarks'])['older']
    for name, block in pages.BLOCKS.items():
        last = pages.blocks_in(written[block.page])[name].splitlines()[-1]
        old = pages.files_of(block, files) is None
        assert last.startswith(pages.OLDER[language] if old else pages.MEASURED[language]), name
        assert COMMIT.search(last), name
        assert old == (f'[{pages.sayer(language)(*block.title)}]({block.page}.md)' in listed), name


@pytest.mark.parametrize('language', LANGUAGES)
def test_no_commit_is_named_outside_of_the_blocks(pages, language):
    for path in (DOCS / language).glob('*.md'):
        outside = pages.MARKED.sub('', path.read_text(encoding='utf-8'))
        assert COMMIT.findall(outside) == [], path


@pytest.mark.parametrize('language', LANGUAGES)
def test_every_block_is_on_its_page_once(pages, language):
    for page, text in texts(language, pages).items():
        marks = re.findall(r'<!-- measured: (\w+) -->', text)
        known = [name for name, block in pages.BLOCKS.items() if block.page == page]
        assert sorted(marks) == sorted([*known, *(['older'] if page == 'benchmarks' else [])])
        assert text.count('<!-- end -->') == len(marks) == len(pages.blocks_in(text))


def test_every_table_is_measured_or_has_a_reason(pages, run_all):
    used = {name for block in pages.BLOCKS.values() for name in block.files}
    assert used == set(run_all.TABLES)
    for name, block in pages.BLOCKS.items():
        assert bool(block.render) == bool(block.files), name
        assert block.files or all(block.reason), name


# with files -----------------------------------------------------------------------------------


def test_a_whole_run_fills_every_table_in_both_languages(pages):
    files = invented()
    assert set(files) == {name for block in pages.BLOCKS.values() for name in block.files}
    assert problems_of(pages, files) == []
    made = pages.make_pages(DOCS, files)
    for language in LANGUAGES:
        for name, block in pages.BLOCKS.items():
            text = pages.blocks_in(made[DOCS / language / f'{block.page}.md'])[name]
            assert ('0123abcd' in text) == bool(block.files), name
        listed = pages.blocks_in(made[DOCS / language / 'benchmarks.md'])['older']
        assert len(listed.splitlines()) == 2 + 1  # what needs root
    for page in pages.PAGES:
        english, chinese = (made[DOCS / language / f'{page}.md'] for language in LANGUAGES)
        rows = [
            [line.count('|') for line in text.splitlines() if line.startswith('| ')]
            for text in (english, chinese)
        ]
        assert rows[0] == rows[1]
        assert not re.search('[\u4e00-\u9fff]', english.replace('简体中文', ''))


def test_figures_stand_where_they_belong(pages):
    files, say = invented(), pages.sayer('en')
    made = {n: b.render(files, say) for n, b in pages.BLOCKS.items() if n in ('guard', 'imports')}
    assert made['guard'].splitlines()[-1] == '| CNN | 1.2% |'
    assert made['imports'].splitlines()[-1] == '| mmdevplug | 0.020 |'
    block = pages.BLOCKS['scale']
    rows = block.render({name: files[name] for name in block.files}, say).splitlines()
    assert rows[0] == '| ranks | 2 | 96 |'
    assert rows[2].endswith('; torchrun | 5.2; 5.2 | 133 |')
    block = pages.BLOCKS['averaging']
    rows = block.render({name: files[name] for name in block.files}, say).splitlines()[2:]
    assert (
        rows[0] == '| CPU, 2 ranks, 48 MB | 1.0 | 4.0 | 4.5 | 9.0 | **3.5** | 3.0 | 1.17 |  |  |'
    )
    assert rows[1].startswith('| PrivateUse1 stand-in, 2 ranks, 48 MB | 1.0 | refuses |  | 9.0 |')
    assert rows[3].endswith('| 3.0 | 1.67 | 3.5 | 1.43 |')


def test_files_of_several_commits_are_found(pages, tmp_path, monkeypatch):
    files = invented(scale='89abcdef')
    assert problems_of(pages, files) == ["several commits: ['0123abcd', '89abcdef']"]
    assert problems_of(pages, invented(scale='0123abcd+'))[-1] == 'scale: +'
    for language in LANGUAGES:
        (tmp_path / 'docs' / language).mkdir(parents=True)
        for page, text in texts(language, pages).items():
            (tmp_path / 'docs' / language / f'{page}.md').write_text(text, encoding='utf-8')
    (tmp_path / 'docs' / 'images').mkdir()
    (tmp_path / 'files').mkdir()
    for name in ('scale', 'scale_96'):
        (tmp_path / 'files' / f'{name}.json').write_text(json.dumps(files[name]))
    words = ['benchmark_pages.py', '--files', str(tmp_path / 'files')]
    monkeypatch.setattr(sys, 'argv', [*words, '--docs', str(tmp_path / 'docs')])
    with pytest.raises(SystemExit, match='figures of several commits, 0123abcd, 89abcdef'):
        pages.main()
    page = (tmp_path / 'docs' / 'en' / 'clusters.md').read_text(encoding='utf-8')
    assert 'Measured at commit 0123abcd, 89abcdef (torch 2.13.0, 2 cores).' in page


# measuring ------------------------------------------------------------------------------------


def asked(run_all, monkeypatch, *words):
    monkeypatch.setattr(sys, 'argv', ['run_all.py', *words])
    return run_all.parse_args()


def test_a_run_continues_where_it_was_interrupted(run_all, tmp_path, monkeypatch, capsys):
    commands = []

    def write(command, **_):
        commands.append(command)
        if 'device_guard' in command[1]:
            raise subprocess.CalledProcessError(3, command)
        with open(command[-1], 'w') as file:
            json.dump(dict(home, rows=[]), file)

    home = dict(HOME)
    monkeypatch.setattr(run_all.subprocess, 'run', write)
    names = ['import_time', 'device_guard', 'spmd']
    words = [*names, '--folder', str(tmp_path), '--xla-python', 'other']
    args = asked(run_all, monkeypatch, *words)
    assert run_all.run(args, '0123abcd') == ['device_guard']
    assert [command[0] for command in commands] == [sys.executable, sys.executable, 'other']
    written = json.loads((tmp_path / 'spmd.json').read_text())
    assert written['command'] == 'PJRT_DEVICE=CPU python x.py'
    assert not written['quick']
    commands.clear()
    run_all.run(args, '0123abcd')
    assert len(commands) == 1  # the one that failed
    assert 'measured on 0123abcd already: import_time, spmd' in capsys.readouterr().out
    commands.clear()
    with pytest.raises(SystemExit, match='measured on commit 0123abcd, but the run began on 89ab'):
        run_all.run(args, '89abcdef')
    assert json.loads((tmp_path / 'import_time.json').read_text())['commit'] == '0123abcd'
    home['commit'] = '89abcdef'
    commands.clear()
    run_all.run(args, '89abcdef')
    assert len(commands) == 3
    assert re.search(
        r'import_time +\d+\.\d min\n.*in all +\d+\.\d min', capsys.readouterr().out, re.S
    )


def test_options_of_quick_replace_those_of_the_table(run_all, tmp_path):
    table = run_all.TABLES['placement']
    words = run_all.command_of(table, 'python', tmp_path, quick=True)
    assert words[words.index('--models') + 1] == 'GPT-2 XL'
    assert words.index('--rounds', words.index('--blocks')) > words.index('--rounds')


def test_what_no_page_may_show_is_refused(run_all, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        asked(run_all, monkeypatch, '--quick')
    assert '--quick needs a --folder' in capsys.readouterr().err
    with pytest.raises(SystemExit):
        asked(run_all, monkeypatch, 'scales')
    assert "unknown tables ['scales']: expected some of import_time" in capsys.readouterr().err
    monkeypatch.setattr(run_all, 'current_commit', lambda: '0123abcd+')
    asked(run_all, monkeypatch, 'scale')
    with pytest.raises(SystemExit, match='files differ from commit 0123abcd'):
        run_all.main()


def test_a_busy_machine_is_told(run_all, monkeypatch, capsys):
    monkeypatch.setattr(run_all.os, 'cpu_count', lambda: 2)
    monkeypatch.setattr(run_all.os, 'getloadavg', lambda: (0.4, 9.0, 9.0))
    run_all.warn_of_load()
    assert capsys.readouterr().out == ''
    monkeypatch.setattr(run_all.os, 'getloadavg', lambda: (1.5, 0.0, 0.0))
    run_all.warn_of_load()
    assert 'The load is 1.5 on 2 cores' in capsys.readouterr().out


def test_all_tables_take_an_hour_at_most(run_all):
    assert sum(table.minutes for table in run_all.TABLES.values()) <= 60
