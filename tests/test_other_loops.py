"""Scripts of other loops: they stand on their page, and train on two cards as on the CPU."""

import contextlib
import io
import os
import re
import runpy
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.commands import python
from tests.jobs import ROOT, install_card, need_card, torch_before
from tests.ranks import free_port, launch_variables, run_ranks

FOLDER = ROOT / 'docs' / 'examples' / 'other_loops'
SCRIPTS = ('plain_pytorch', 'accelerate_loop', 'trl_grpo', 'peft_trainer', 'lightning_loop')
#: Without MMEngine, as where it is not installed.
WITHOUT = """
import runpy, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] == 'mmengine':
            raise ModuleNotFoundError("No module named 'mmengine'", name='mmengine')
sys.meta_path.insert(0, Absent())
import mmdevplug.accelerators, mmdevplug.samples, mmdevplug.staged
import mmdevplug.distributed.waiting, mmdevplug.environments.launch_variables
sys.argv = ['plain_pytorch.py', 'cpu']
runpy.run_path('plain_pytorch.py', run_name='__main__')
"""


@pytest.mark.parametrize('language', ['en', 'zh_cn'])
def test_the_page_has_the_scripts(language):
    page = (ROOT / 'docs' / language / 'other_loops.md').read_text(encoding='utf-8')
    for name in (*SCRIPTS, 'accelerate_ranks', 'dynamic_sampling'):
        assert (FOLDER / f'{name}.py').read_text(encoding='utf-8') in page, name


def run_script(folder, name, *arguments):
    """Run a script in this process; what it printed."""
    if arguments[0] != 'cpu':
        install_card(arguments[0].partition(':')[0])
    sys.path.insert(0, str(FOLDER))
    sys.argv = [name, *arguments]
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(FOLDER / f'{name}.py'), run_name='__main__')
    return out.getvalue()


def run_all(devices, folder):
    """Run all scripts in this process; what each printed."""
    return {name: run_script(folder, name, devices) for name in SCRIPTS}


def run_resumed(devices, folder):
    """Lightning's losses: of two epochs, and of one epoch and a resumed one."""
    whole = run_script(folder, 'lightning_loop', devices, '--epochs', '2')
    first = run_script(folder, 'lightning_loop', devices)
    resumed = ('--epochs', '2', '--resume', 'lightning.ckpt')
    return (
        losses(whole),
        losses(first),
        losses(run_script(folder, 'lightning_loop', devices, *resumed)),
    )


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    """What the scripts printed on the CPU and on two cards."""
    for name in ('trl', 'peft', 'lightning'):
        pytest.importorskip(name, reason="needs the extra 'loops'")
    need_card()
    folder = tmp_path_factory.mktemp('loops')
    return [run_ranks(run_all, 0, devices, folder)[0] for devices in ('cpu', 'zeta:0-1')]


def start(*arguments, **environ):
    """Run a program in the scripts' folder, with PyTorch imported and nothing of MMEngine's."""
    env = {**os.environ, 'PYTHONPATH': str(ROOT), **environ}
    return python(*arguments, cwd=FOLDER, env=env, mmengine=False)


def losses(text):
    (line,) = [line for line in text.splitlines() if line.startswith('losses ')]
    return [float(word) for word in line.split()[1:]]


@pytest.mark.parametrize('name', SCRIPTS)
def test_losses_on_two_cards_are_those_of_the_cpu(runs, name):
    on_cpu, on_cards = (losses(run[name]) for run in runs)
    assert len(on_cpu) >= 3
    assert on_cards == pytest.approx(on_cpu, abs=1e-5)
    assert len(set(on_cpu)) == len(on_cpu)
    if name != 'trl_grpo':  # whose loss says nothing of the rewards
        assert on_cpu[-1] < on_cpu[0] - 0.05


def test_the_guard_names_what_it_moved_for_grpo(runs):
    report = runs[1]['trl_grpo']
    assert re.search(r'GRPOTrainer\._compute_loss.*: .*coef_1 \* advantages', report)
    for name in set(SCRIPTS) - {'trl_grpo'}:
        assert 'No operation had operands on different devices' in runs[1][name], name


def run_trainers(devices, folder):
    """Losses of other trainers of TRL, by their names."""
    from datasets import Dataset

    if devices != 'cpu':
        install_card('zeta')
    sys.path.insert(0, str(FOLDER))
    import tiny_llama
    import trl

    from mmdevplug.device_guard import DeviceGuard
    from mmdevplug.model_parallel import dispatch, plan

    def spread():
        model = tiny_llama.tiny_llama()
        return model if devices == 'cpu' else dispatch(model, plan(model, devices, training=True))

    prompts, chosen = ['a b', 'd e', 'a c e', 'b d'] * 4, [' c d', ' f', ' a', ' a b c'] * 4
    texts = {'text': [prompt + answer for prompt, answer in zip(prompts, chosen)]}
    pairs = {'prompt': prompts, 'chosen': chosen, 'rejected': [' d', ' f a', ' b b', ' e f'] * 4}
    found = {}
    for name, data, more in (('SFT', texts, ()), ('DPO', pairs, (spread(),))):

        class Trainer(getattr(trl, f'{name}Trainer')):
            def training_step(self, *args, **options):
                return super().training_step(*args, **options).to(self.args.device)

        options = dict(
            output_dir=str(folder),
            max_steps=3,
            per_device_train_batch_size=4,
            logging_steps=1,
            learning_rate=0.01,
            report_to='none',
            save_strategy='no',
            bf16=False,
            use_cpu=devices == 'cpu',
        )
        model = spread()
        trainer = Trainer(
            model,
            *more,
            args=getattr(trl, f'{name}Config')(**options),
            train_dataset=Dataset.from_dict(data),
            processing_class=tiny_llama.tiny_tokenizer(),
        )
        with DeviceGuard('move', model=model):
            trainer.train()
        found[name] = [line['loss'] for line in trainer.state.log_history if 'loss' in line]
    return found


def test_other_trainers_of_trl_train_as_on_the_cpu(tmp_path):
    pytest.importorskip('trl', reason="needs the extra 'loops'")
    need_card()
    on_cpu, on_cards = (
        run_ranks(run_trainers, 0, devices, tmp_path)[0] for devices in ('cpu', 'zeta:0-1')
    )
    for name, expected in on_cpu.items():
        assert on_cards[name] == pytest.approx(expected, abs=1e-5), name
        assert len(set(expected)) == 3, name


def test_a_loop_needs_no_mmengine(runs):
    done = start('-c', WITHOUT)
    assert done.returncode == 0, done.stderr
    assert losses(done.stdout) == losses(runs[0]['plain_pytorch'])


@pytest.mark.parametrize(
    'ranks',
    [
        0,
        pytest.param(
            2, marks=pytest.mark.skipif(torch_before('2.0.0'), reason='staged needs PyTorch 2')
        ),
    ],
)
def test_all_ranks_sample_until_they_have_learnt(ranks):
    port = str(free_port())
    code = WITHOUT.replace('plain_pytorch.py', 'dynamic_sampling.py')

    def run(rank):
        return start('-c', code, **(launch_variables(rank, ranks, port) if ranks else {}))

    with ThreadPoolExecutor() as pool:
        jobs = list(pool.map(run, range(max(ranks, 1))))
    assert [job.returncode for job in jobs] == [0] * len(jobs), jobs
    assert '10 of 10 right' in jobs[0].stdout
    assert len(losses(jobs[0].stdout)) > 10


def test_lightning_resumes_as_if_it_had_not_stopped(tmp_path):
    pytest.importorskip('lightning', reason="needs the extra 'loops'")
    need_card()
    ((whole, first, resumed),) = run_ranks(run_resumed, 0, 'zeta:0-1', tmp_path)
    assert len(first) == len(resumed) == 5
    assert first + resumed == pytest.approx(whole, abs=1e-6)
    assert len(set(whole)) == 10


def test_accelerate_divides_batches_and_averages_over_ranks(tmp_path):
    pytest.importorskip('trl', reason="needs the extra 'loops'")
    need_card()
    (alone,) = run_ranks(run_script, 0, tmp_path, 'accelerate_ranks', 'cpu')
    together = run_ranks(run_script, 2, tmp_path, 'accelerate_ranks', 'zeta')
    assert '1 rank(s), samples of each in a step: 8' in alone
    assert '2 rank(s), samples of each in a step: 4' in together[0]
    assert losses(together[0]) == pytest.approx(losses(alone), abs=1e-5)
    first, _, last = losses(alone)
    assert last < first - 0.05


def test_a_script_runs_on_the_stand_in():
    pytest.importorskip('trl', reason="needs the extra 'loops'")
    need_card()
    paths = [str(ROOT), str(ROOT / 'standins' / 'fakecard')]
    script = str(FOLDER / 'plain_pytorch.py')
    done = start(script, 'zeta:0,1', PYTHONPATH=os.pathsep.join(paths), FAKECARD_NAME='zeta')
    assert done.returncode == 0, done.stderr
    assert 'zeta:1' in done.stdout
    assert len(losses(done.stdout)) == 5


def test_without_mmengine_a_message_says_so():
    code = (
        WITHOUT.partition('import mmdevplug')[0]
        + """
from mmdevplug.cli.main import main
assert main(['--help']) == main(['--version']) == 0
sys.exit(main(['plan']))
"""
    )
    done = start('-c', code)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1
    assert '--version' in done.stdout
    assert line.startswith('mmdevplug: mmdevplug extends MMEngine')
