"""The documents: links lead somewhere, both languages say the same, commands can be typed."""

import ast
import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.jobs import ROOT

DOCS = ROOT / 'docs'
EN, ZH = DOCS / 'en', DOCS / 'zh_cn'
NAMES = sorted(path.name for path in EN.glob('*.md'))
READMES = [ROOT / 'README.md', ROOT / 'README_zh-CN.md', ROOT / 'standins/README.md']
#: Both languages of what lies beside the README, but for the changes, which are in English.
TOP = [
    (ROOT / f'{name}.md', ROOT / f'{name}_zh-CN.md')
    for name in ('README', 'CONTRIBUTING', 'SECURITY')
]
PAGES = [*sorted(EN.glob('*.md')), *sorted(ZH.glob('*.md')), *READMES, *TOP[1], *TOP[2]]
#: Pairs that have to say the same.
PAIRS = [(EN / name, ZH / name) for name in NAMES] + TOP

FENCE = re.compile(r'^( *)```(\S*)[^\n]*\n(.*?)^\1```$', re.MULTILINE | re.DOTALL)
HEADING = re.compile(r'^(#+) (.*)$', re.MULTILINE)
LINK = re.compile(r'!?\[[^\]]*\]\(([^)\s]+)\)')
HAN = re.compile(r'[\u4e00-\u9fff]')


def read(path):
    return path.read_text(encoding='utf-8')


def name_of(path):
    return str(path.relative_to(ROOT))


def over(pages):
    return pytest.mark.parametrize('page', pages, ids=name_of)


def blocks(page):
    """The code blocks of a page: language and text, without the indentation of a list."""
    found = []
    for indent, language, text in FENCE.findall(read(page)):
        lines = [line[len(indent) :] for line in text.splitlines()]
        found.append((language, '\n'.join(lines)))
    return found


def prose(page):
    """A page without its code blocks."""
    return FENCE.sub('', read(page))


# links ----------------------------------------------------------------------------------------


def slug(heading):
    """The anchor that GitHub gives a heading."""
    plain = re.sub(r'[^\w\- ]', '', heading.strip().lower(), flags=re.UNICODE)
    return plain.replace(' ', '-')


@over(PAGES)
def test_links_lead_to_files_and_headings(page):
    for target in LINK.findall(prose(page)):
        if re.match(r'https?:|mailto:', target):
            continue
        path, _, anchor = target.partition('#')
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f'{target} of {name_of(page)}'
        if anchor:
            anchors = [slug(words) for _, words in HEADING.findall(prose(linked))]
            assert anchor in anchors, f'{target} of {name_of(page)}: there are {anchors}'


def test_every_picture_is_shown():
    shown = {
        (page.parent / target).resolve()
        for page in PAGES
        for target in LINK.findall(read(page))
        if target.endswith(('.png', '.svg'))
    }
    lying = {path.resolve() for path in (DOCS / 'images').iterdir()}
    assert lying <= shown


# both languages -------------------------------------------------------------------------------


def test_both_languages_have_the_same_pages():
    kinds = ('*.md', '*.rst', 'conf.py')
    english, chinese = (
        sorted(path.name for kind in kinds for path in folder.glob(kind)) for folder in (EN, ZH)
    )
    assert english == chinese


@pytest.mark.parametrize(('english', 'chinese'), PAIRS, ids=lambda path: path.name)
def test_headings_are_of_the_same_levels(english, chinese):
    levels = [[mark for mark, _ in HEADING.findall(prose(page))] for page in (english, chinese)]
    assert levels[0] == levels[1]


def without_comments(language, text):
    """A block without what is translated: comments."""
    if language not in ('python', 'bash', 'yaml'):
        return text
    lines = [re.sub(r'(^|\s+)#.*$', '', line).rstrip() for line in text.splitlines()]
    return '\n'.join(line for line in lines if line)


@pytest.mark.parametrize(('english', 'chinese'), PAIRS, ids=lambda path: path.name)
def test_code_blocks_are_the_same(english, chinese):
    one, other = (
        [(language, without_comments(language, text)) for language, text in blocks(page)]
        for page in (english, chinese)
    )
    assert one == other


@pytest.mark.parametrize(('english', 'chinese'), PAIRS, ids=lambda path: path.name)
def test_tables_have_the_same_rows_and_links_the_same_targets(english, chinese):
    rows = [
        [line.count('|') for line in prose(page).splitlines() if line.lstrip().startswith('| ')]
        for page in (english, chinese)
    ]
    assert rows[0] == rows[1]
    pages = [
        sorted(
            re.sub(r'#.*', '', target).replace('zh_cn', 'en').replace('_zh-CN', '')
            for target in LINK.findall(prose(page))
        )
        for page in (english, chinese)
    ]
    assert pages[0] == pages[1]


@over([ZH / name for name in NAMES])
def test_the_chinese_page_is_chinese(page):
    english = prose(EN / page.name)
    assert not HAN.search(english.replace('简体中文', ''))
    # Without tables and lists, which in pages of figures hold names alone.
    told = [line for line in prose(page).splitlines() if line[:1] not in ('|', '-')]
    assert len(HAN.findall(''.join(told))) > 0.1 * len(''.join(told))


@pytest.mark.parametrize(
    ('readme', 'heading', 'page'),
    [(READMES[0], '## Status', EN / 'support.md'), (READMES[1], '## 验证情况', ZH / 'support.md')],
    ids=lambda value: getattr(value, 'name', value),
)
def test_tables_of_the_readme_are_those_of_the_page(readme, heading, page):
    section = read(readme).split(f'\n{heading}\n', 1)[1].split('\n## ', 1)[0]
    rows = {line for line in section.splitlines() if line.startswith('|')}
    assert rows
    assert rows - set(read(page).splitlines()) == set()


@over(READMES[:2])
def test_the_readme_is_short_and_without_measurements(page):
    text = read(page)
    assert len(text.splitlines()) <= 180
    assert not re.search(r'\d (ms|毫秒)|\*\*[\d.]+\*\*', text), 'they belong into benchmarks.md'


@pytest.mark.parametrize('language', [EN, ZH], ids=name_of)
def test_every_page_is_in_the_index(language):
    listed = re.findall(r'^   (\w+)$', read(language / 'index.rst'), re.MULTILINE)
    pages = {path.stem for path in (*language.glob('*.md'), language / 'api.rst')}
    assert sorted(listed) == sorted(pages)


def modules_of_the_api(language):
    return set(re.findall(r'^\.\. automodule:: (\S+)$', read(language / 'api.rst'), re.MULTILINE))


def test_the_api_has_every_public_module():
    public = {'mmdevplug'} | {f'mmdevplug.{name}' for name in ('autopatch', 'errors', 'registry')}
    for path in (ROOT / 'mmdevplug').rglob('__init__.py'):
        if '__all__' in read(path):
            public.add('.'.join(path.parent.relative_to(ROOT).parts))
    # What pages show how to use.
    for page in PAGES:
        for language, text in blocks(page):
            for node in ast.walk(ast.parse(text)) if language == 'python' else ():
                if isinstance(node, ast.ImportFrom) and (node.module or '').startswith(
                    'mmdevplug'
                ):
                    public.add(node.module)
    public = {name for name in public if not name.startswith('mmdevplug.configs')}
    assert public <= modules_of_the_api(EN)
    assert modules_of_the_api(EN) == modules_of_the_api(ZH)


# code -----------------------------------------------------------------------------------------


@over(PAGES)
def test_python_blocks_parse(page):
    for language, text in blocks(page):
        if language == 'python':
            ast.parse(text)


def commands(page):
    """The commands of the bash blocks, each as its words, without variables before it."""
    for language, text in blocks(page):
        if language != 'bash':
            continue
        for line in text.replace('\\\n', ' ').splitlines():
            for part in line.split(' && '):
                words = shlex.split(part, comments=True)
                while words and re.match(r'[A-Z_]\w*=', words[0]):
                    words.pop(0)
                if words:
                    yield words


#: Programs that are not ours.
FROM_ELSEWHERE = (
    *('pip', 'mim', 'docker', 'python', 'python3', 'pytest', 'tensorboard'),
    *('git', 'export', 'source', 'cd'),
)
ALL_COMMANDS = [
    pytest.param(words, id=f'{name_of(page)}: {" ".join(words)}'[:120])
    for page in PAGES
    for words in commands(page)
]


def options_of(script):
    """The options that a script defines, by reading it: running one imports a lot."""
    found = {'--help'}
    for node in ast.walk(ast.parse(read(script))):
        if isinstance(node, ast.Call) and getattr(node.func, 'attr', '') == 'add_argument':
            constants = [a.value for a in node.args if isinstance(a, ast.Constant)]
            found.update(constants)
    return found


def check_ours(command, arguments):
    """Parse the arguments as the command would."""
    parser = importlib.import_module(f'mmdevplug.cli.{command.replace("-", "_")}').build_parser()
    try:
        parser.parse_args(arguments)
    except SystemExit as end:  # what argparse does
        raise AssertionError(f'{command} {arguments} is refused') from end


def check_script(path, arguments):
    script = ROOT / path
    assert script.is_file(), path
    if script.parent == ROOT / 'tools':
        check_ours(script.stem, arguments)
        return
    asked = {word.split('=')[0] for word in arguments if word.startswith('--')}
    assert asked <= options_of(script), path


@pytest.mark.parametrize('words', ALL_COMMANDS)
def test_command_can_be_typed(words):
    program, *arguments = words
    if words == ['mmdevplug', '--version']:
        return  # tests/cli/test_mistakes.py runs it
    if program in ('mmdevplug', 'accelerate', 'torchrun') and 'mmdevplug' in words:
        command, *arguments = words[words.index('mmdevplug') + 1 :]
        check_ours(command, arguments)
    elif program in ('python', 'bash') and not arguments[0].startswith('-'):
        if arguments[0].endswith('.sh'):
            assert (ROOT / arguments[0]).is_file()
        else:
            check_script(arguments[0], arguments[1:])
    elif program == 'make':
        assert re.search(rf'^{arguments[0]}:', read(ROOT / 'Makefile'), re.MULTILINE)
    elif program == 'torchrun':
        script = next(word for word in arguments if word.endswith('.py'))
        check_script(script, arguments[arguments.index(script) + 1 :])
    elif '/' in program and not program.startswith('.venv'):
        assert (ROOT / program).is_file()
    else:
        assert program.split('/')[-1] in FROM_ELSEWHERE
    for word in words:
        if re.match(r'(configs|tools|benchmarks|demo|docs|tests)/.*\.(py|sh|md)$', word):
            assert (ROOT / word).is_file(), word


#: Extras whose packages need a torch of their choice.
REPLACES_TORCH = re.compile(r'\[[^]]*\b(?:xla|placement|llama)\b|\btorch==(?!\$)')


@over(PAGES)
def test_no_command_replaces_a_torch_or_the_environment_of_make(page):
    for language, text in blocks(page):
        if language != 'bash':
            continue
        own = False  # whether the block has made an environment
        for line in text.splitlines():
            assert '-m venv .venv' not in line, '`make install` has its own there'
            own |= '-m venv ../' in line
            if line.startswith('pip install') and REPLACES_TORCH.search(line):
                assert own or 'torch==$(python -c' in line, line


PATH = re.compile(r'`((?:configs|tools|benchmarks|demo|docs|standins|tests|mmdevplug)/[\w./*-]+)`')
INLINE = re.compile(r'`(mmdevplug [a-z][^`]*|python \w+/\w+\.py[^`]*)`')


# That of releases names the files that ran then.
@over([page for page in PAGES if page.name != 'compatibility.md'])
def test_paths_in_the_text_exist(page):
    for path in PATH.findall(prose(page)):
        assert list(ROOT.glob(path.rstrip('/'))), path


@over(PAGES)
def test_commands_in_the_text_have_their_options(page):
    for code in INLINE.findall(prose(page)):
        program, name, *arguments = code.split()
        asked = {word.split('=')[0] for word in arguments if word.startswith('--')}
        if program == 'python' and not name.startswith('tools/'):
            assert asked <= options_of(ROOT / name), code
            continue
        module = f'mmdevplug.cli.{Path(name).stem.replace("-", "_")}'
        parser = importlib.import_module(module).build_parser()
        assert asked <= set(parser._option_string_actions), code


# what scripts make ----------------------------------------------------------------------------


def test_drawings_are_those_of_the_script(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS / 'drawings'))
    draw = importlib.import_module('draw')
    try:
        for name in draw.DRAWINGS:
            for language in draw.LANGUAGES:
                lying = read(DOCS / 'images' / f'{name}.{language}.svg')
                assert lying == draw.render(name, language), 'run docs/drawings/draw.py'
    finally:
        for module in ('draw', 'svg'):
            sys.modules.pop(module, None)


@pytest.mark.parametrize('name', ['train'])
def test_recordings_show_what_the_pages_say(name):
    picture = read(DOCS / 'images' / f'{name}.svg')
    plain = picture.replace('&#160;', ' ')
    assert f'mmdevplug {name} ' in plain
    assert 'http://www.w3.org' in plain
    assert 'src:' not in plain  # it loads nothing


def test_the_recorded_training_compiles_no_more():
    picture = read(DOCS / 'images' / 'train.svg')
    assert ': 2 graph executions each, 0 recompilations' in picture
    apart = re.search(r'they differ by ([\d.e-]+) at most', picture)
    assert float(apart.group(1)) < 1e-2
