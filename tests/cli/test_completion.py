"""The script with which a shell completes the command."""

import pytest

from mmdevplug.cli import completion, main as command
from tests.commands import run

#: Completes words in bash as it does after a tab.
COMPLETE = """
source ./script
function=$(complete -p mmdevplug | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
$function
echo "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ('words', 'completed'),
    [
        (['tr'], 'train'),
        (['train', '--resu'], '--resume --resume-settings'),
        (['test', '--launcher', ''], 'none pytorch mpi slurm kubernetes'),
        (['launch-config', '--nod'], '--node-rank'),
    ],
)
def test_bash_completes_commands_options_and_choices(tmp_path, capsys, words, completed):
    pytest.importorskip('shtab', reason="needs the extra 'completion'")
    assert command.main(['--print-completion', 'bash']) == 0
    (tmp_path / 'script').write_text(capsys.readouterr().out)
    done = run('bash', '-c', COMPLETE, 'bash', 'mmdevplug', *words, cwd=tmp_path)
    assert done.stdout.strip() == completed, done.stderr


def test_an_unknown_shell_is_refused(capsys):
    pytest.importorskip('shtab', reason="needs the extra 'completion'")
    assert command.main(['--print-completion', 'bsh']) == 1
    assert '--print-completion bsh: expected bash or zsh' in capsys.readouterr().err


def test_without_shtab_the_extra_is_named(monkeypatch, capsys):
    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(completion, 'import_module', missing)
    assert command.main(['--print-completion', 'bash']) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("needs the package shtab: pip install 'mmdevplug[completion]'")
