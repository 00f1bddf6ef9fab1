"""Files that hosting sites read name what there is."""

import re

import pytest
import yaml

from mmdevplug import __version__
from tests.jobs import ROOT

FORMS = sorted((ROOT / '.github').glob('**/*.yml'))


@pytest.mark.parametrize('path', FORMS, ids=lambda path: path.name)
def test_a_file_of_the_site_is_yaml(path):
    assert yaml.safe_load(path.read_text('utf-8'))


def test_the_workflow_runs_targets_that_there_are():
    jobs = yaml.safe_load((ROOT / '.github/workflows/checks.yml').read_text())['jobs']
    commands = [step['run'] for job in jobs.values() for step in job['steps'] if 'run' in step]
    targets = {word for command in commands for word in command.split()[1:] if '=' not in word}
    assert {'lint', 'demo', 'test', 'docs'} <= targets
    there = re.findall(r'^([\w-]+):', (ROOT / 'Makefile').read_text(), re.MULTILINE)
    assert targets <= {*there}


def test_the_citation_is_of_this_version():
    cited = yaml.safe_load((ROOT / 'CITATION.cff').read_text())
    assert cited['version'] == __version__
    assert cited['license'] == 'Apache-2.0'


def test_the_docs_are_built_from_files_that_there_are():
    config = yaml.safe_load((ROOT / '.readthedocs.yaml').read_text())
    named = [config['sphinx']['configuration'], config['python']['install'][0]['requirements']]
    assert [name for name in named if not (ROOT / name).is_file()] == []
