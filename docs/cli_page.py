"""Write ``docs/*/command_line.md`` from the parsers in ``mmdevplug/cli``.

Arguments, values, defaults and the English meanings stand in the parsers; the Chinese meanings
stand here. A test compares the pages with both.
"""

import argparse
import sys
from importlib import import_module
from typing import Any, Dict, Iterator, List

from tables import table, write_pages

#: A command that can be typed, for each.
EXAMPLES = {
    'train': 'mmdevplug train your_config.py --accelerator gcu --nproc 8 --resume',
    'launch-config': 'mmdevplug launch-config --nproc 8 --out accelerate.yaml',
    'doctor': 'mmdevplug doctor --config your_config.py',
    'plan': 'mmdevplug plan your_config.py --devices cuda:0-3 --training',
    'check': 'mmdevplug check your_config.py --accelerator gcu',
    'test': 'mmdevplug test your_config.py work_dirs/mine/epoch_12.pth --accelerator gcu',
}

TEXTS: Dict[str, Dict[str, Any]] = dict(
    en=dict(
        heading='# Command line',
        other='English | [简体中文](../zh_cn/command_line.md)',
        intro="""\
Read this page to look up an argument; `mmdevplug COMMAND --help` prints the same.
`python -m mmdevplug` equals `mmdevplug`. `tools/train.py` and `tools/test.py` take the arguments
of `train` and `test`. `mmdevplug --version` prints the releases of mmdevplug, MMEngine and
PyTorch.

`mmdevplug --print-completion bash` prints a script with which bash completes commands and
options; zsh and tcsh work, too. It needs `pip install '.[completion]'`. Save it where your shell
looks for such scripts, for bash `~/.local/share/bash-completion/completions/mmdevplug`.

The exit status is 0 after success, 1 after an error, and 2 after a wrong argument. A signal
makes it 128 + its number, for example 143 after SIGTERM.""",
        shared='These arguments are the same as in `train`: {}.',
        comma=', ',
        titles=('argument', 'values', 'default', 'meaning'),
        values=dict(flag='', text='text', number='number', integer='integer'),
        optional='{} (may be left out)',
        or_auto='{}, `auto`',
        required='required',
    ),
    zh_cn=dict(
        heading='# 命令行',
        other='[English](../en/command_line.md) | 简体中文',
        intro="""\
查找参数时请阅读本页；`mmdevplug COMMAND --help` 打印同样的内容。`python -m mmdevplug`
与 `mmdevplug` 相同。`tools/train.py` 和 `tools/test.py` 接受 `train` 和 `test` 的参数。
`mmdevplug --version` 打印 mmdevplug、MMEngine 和 PyTorch 的版本。

`mmdevplug --print-completion bash` 打印 bash 用来补全命令和选项的脚本，也支持 zsh 和 tcsh。
它需要 `pip install '.[completion]'`。请把脚本保存到 shell 寻找它的位置，对 bash 是
`~/.local/share/bash-completion/completions/mmdevplug`。

一切正常时退出状态为 0，出错时为 1，参数有误时为 2；被信号结束时为 128 加信号编号，例如 SIGTERM 为
143。""",
        shared='下列参数与 `train` 相同：{}。',
        comma='、',
        titles=('参数', '取值', '默认值', '含义'),
        values=dict(flag='', text='文本', number='数', integer='整数'),
        optional='{}（可以省略）',
        or_auto='{}、`auto`',
        required='必填',
        descriptions={
            'train': '训练模型。',
            'launch-config': '为 `accelerate launch --config_file` 写出文件，并打印用 accelerate '
            '和 torchrun 启动作业的命令；不写 --master-port 时用端口 29500。',
            'doctor': '说明安装了什么、有哪些加速器、本进程如何启动，'
            '以及配置有什么问题，并训练其一步。除所要求的文件外不写入任何内容。'
            '有错误时退出状态为 1。',
            'plan': '计划哪个设备放模型的哪一部分，不需要权重，也不需要设备。',
            'check': '像 `mmdevplug train` 那样启动某个配置的训练，执行一个训练步骤，'
            '说明有什么问题以及一切所在的设备。不保存任何内容。有问题时退出状态为 1。',
            'test': '测试模型。',
        },
        meanings={
            'config': '配置的路径',
            'checkpoint': '检查点的路径或网址',
            'model': 'OpenMMLab 的配置，或 transformers 的模型：config.json 或其所在目录',
            '--cfg-options': '覆盖配置中的设置：key=value，key="[a,b]"',
            '--accelerator': '把该加速器的基础配置套用在 CONFIG 之上：auto、cpu、cuda、'
            'xla、gcu、npu、mlu、musa、xpu、hpu、mps、tpu，或 PyTorch 认识的其他名字',
            'launch-config --accelerator': '加速器；默认取检测到的',
            'doctor --accelerator': '只检查这一种，例如 cuda、xla、gcu',
            '--work-dir': '存放日志、检查点和结果的目录',
            '--launcher': '启动各进程的程序；默认由 torchrun、Slurm、MPI 或 Kubernetes '
            '设置的环境变量得知，没有这些变量时为 none',
            '--model-parallel': '把模型分到多个设备上；auto 按检测到的设备决定',
            'check --model-parallel': '代替配置中的 model_parallel.enable',
            '--oversubscribe': '启动的进程可以多于核数，或多于内存估计所能容纳的数目',
            '--verbose': '在终端上显示完整的日志，与文件中相同',
            '--resume': '从检查点恢复；不写路径时取工作目录中最新的',
            '--resume-settings': '恢复时优化器和调度器的设置不同，采用哪一边的',
            '--sharded': '把模型分片到各 rank，每个 rank 持有一部分权重',
            '--spmd': '用一个进程驱动 torch_xla 的所有芯片，每个批次分给各芯片',
            '--amp': '用混合精度训练',
            '--auto-scale-lr': '学习率随批大小缩放',
            '--compare-with-cpu': '训练之前先把一个训练步骤与 CPU 上的同一步骤比较',
            '--nproc': '每台主机上的进程数；`auto`：每个设备一个，在 CPU 上训练时每个核一个。'
            'pod 中由 `PET_NPROC_PER_NODE` 设置。',
            '--nnodes': '主机数；各主机运行同一命令，`--node-rank` 各不相同。`MIN:MAX`，如 `1:4`：'
            '主机可以加入和离开，且不写 `--node-rank`。',
            '--node-rank': '本机是第几台主机，从 0 开始；各主机不同。`srun` 通过 `SLURM_NODEID` '
            '设置它。',
            '--master-addr': '主机 0 的名称或地址；弹性作业中，为各主机会合的主机。',
            '--master-port': '主机 0 的空闲端口；不写时，单机自动查找，多机取 29500。',
            '--max-restarts': '失败的进程重新启动的次数；它们从最新的检查点恢复。'
            '不写时为 0，弹性作业为 3，其中主机的加入不计入。',
            '--timeout': '各 rank 放弃互相等待之前的秒数。',
            '--out': '要写的文件',
            'test --out': '存放预测结果的 .pkl 文件',
            '--force': '文件已存在时替换它',
            '--config': '还检查该配置，与 `mmdevplug check` 相同',
            'doctor --json': '存放检查结果的文件；- 表示只打印它',
            '--devices': "例如 'cuda:0-3' 或 'xla:0,xla:2'",
            'check --devices': "用于 model_parallel：一个数，或例如 'cuda:0-3'",
            '--max-memory': "例如 'cuda:0=10GB,cuda:1=8GB'（默认相等）",
            '--strategy': 'auto | balanced | dynamic',
            '--no-split': '保持完整的类或模块：A,B',
            '--balance-threshold': 'dynamic 的阈值，0 到 1',
            '--force-balance': '拒绝不均衡的计划',
            '--no-force-balance': '可以空着某个设备',
            '--allow-cpu': '设备放不下的由主机承担',
            '--training': '计入梯度和优化器',
            '--optimizer': '名称，或每个参数保存的数值个数（默认取配置中的，否则为 adamw）',
            '--dtype': '权重将转换成的类型，例如 bfloat16',
            '--json': '以 JSON 存放计划的文件；- 表示只打印它',
            '--no-comparison': '不与 CPU 比较输出和梯度',
            '--guard': '对混用设备的运算的处理：结束该步骤、报告，或移动其操作数（默认 error）',
            '--tta': '对增强后的输入取平均',
        },
    ),
)


def commands() -> Dict[str, argparse.ArgumentParser]:
    """The parser of each command."""
    from mmdevplug.cli.main import COMMANDS

    modules = {name: f'mmdevplug.cli.{name.replace("-", "_")}' for name in COMMANDS}
    return {name: import_module(module).build_parser() for name, module in modules.items()}


def arguments(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """What ``--help`` lists, without itself."""
    for action in parser._actions:
        if action.help not in (None, argparse.SUPPRESS) and action.dest != 'help':
            yield action


def meaning(command: str, action: argparse.Action, texts: Dict[str, Any]) -> str:
    """What an argument means."""
    if 'meanings' not in texts:
        return str(action.help)
    name = action.option_strings[0] if action.option_strings else action.dest
    meanings = texts['meanings']
    return meanings.get(f'{command} {name}') or meanings.get(name) or _missing(name)


def _missing(name: str) -> str:
    raise SystemExit(f"docs/cli_page.py: TEXTS['zh_cn']['meanings'] has no {name!r}. Add it.")


def rows(
    command: str, parser: argparse.ArgumentParser, texts: Dict[str, Any]
) -> Iterator[List[str]]:
    """The rows of a table: an argument in each."""
    for action in arguments(parser):
        name = action.option_strings[-1] if action.option_strings else action.dest.upper()
        required = action.required or not action.option_strings
        default = '' if action.default in (None, False) else f'`{action.default}`'
        told = meaning(command, action, texts).replace('|', r'\|')
        default = texts['required'] if required else default
        yield [f'`{name}`', _values(action, texts), default, told]


def _values(action: argparse.Action, texts: Dict[str, Any]) -> str:
    if action.choices is not None:
        return ', '.join(f'`{choice}`' for choice in action.choices)
    if action.nargs == 0:
        return texts['values']['flag']
    from mmdevplug.cli.hosts import _number_or_word

    kind = {int: 'integer', float: 'number'}.get(action.type, 'text')  # type: ignore[arg-type]
    if action.type is _number_or_word:
        return texts['or_auto'].format(texts['values']['integer'])
    shown = texts['values'][kind]
    return texts['optional'].format(shown) if action.nargs == '?' else shown


def render(texts: Dict[str, Any]) -> List[str]:
    """The parts of the page in one language."""
    page = [texts['heading'], texts['other'], texts['intro']]
    parsers = commands()
    of_train = list(rows('train', parsers['train'], texts))
    for name, parser in parsers.items():
        listed = list(rows(name, parser, texts))
        shared = [row for row in listed if name != 'train' and row in of_train]
        told = texts['descriptions'][name] if 'descriptions' in texts else parser.description
        page += [
            f'## `mmdevplug {name}`',
            f'```bash\n{EXAMPLES[name]}\n```',
            told if told.endswith(('.', '。')) else f'{told}.',
            table(texts['titles'], [row for row in listed if row not in shared]),
        ]
        if shared:
            names = texts['comma'].join(row[0] for row in shared)
            page.append(texts['shared'].format(names))
    return page


def main() -> None:
    """Write both pages."""
    write_pages('command_line.md', TEXTS, render)


if __name__ == '__main__':
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
