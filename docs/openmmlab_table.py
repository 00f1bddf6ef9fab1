"""Write ``docs/en/openmmlab.md`` and ``docs/zh_cn/openmmlab.md`` from trainings of small models.

``tools/compat.sh openmmlab`` writes the figures; what an installation needs is written here.
"""

import json
from typing import Any, Dict, List, Optional

from tables import DOCS, table, write_pages

RESULTS = DOCS / 'openmmlab' / 'results.json'
#: What was measured of a training: the columns of the table.
MEASURED = ('cpu-1', 'cpu-2', 'zeta-1', 'zeta-2')

COMMANDS = """```bash
tools/compat.sh openmmlab
python docs/openmmlab_table.py
```"""

LANGUAGES: Dict[str, Dict[str, Any]] = dict(
    en=dict(
        heading='# More libraries of OpenMMLab',
        links='English | [简体中文](../zh_cn/openmmlab.md)',
        intro="""\
One of the smallest models of each library trains {} iterations from a config of the library's
release, with a few samples in the format of its data set. MMEngine's own runner trains it on the
CPU, and ours on the CPU and on the stand-in for a card that PyTorch knows only as PrivateUse1: in
one process, and in two, with half of the batch each. MMEngine's runner needs help to start two
processes without a GPU: the test makes the process group, and names the wrapper without
`device_ids`. The figures are the largest difference of any loss from those of MMEngine's runner
with as many processes; 0 means equal, bit for bit. Widths, depths, image sizes and learning rates
are small; augmentation, dropout and synchronized batch normalization are off. Validation was not
part of it. mmseg and mmdet are
tested with every change, on more kinds of devices.""",
        headings=(
            'release',
            'config',
            'loss, first to last',
            'CPU',
            'CPU, 2 ranks',
            'card',
            'card, 2 ranks',
        ),
        measured='Installed: {}; nothing newer was tried.',
        installing='## What it takes to install them',
        library='library',
        needs='what is in the way, and how the environment here was made',
        needed={
            'all of them': 'mmcv 2.1.0 compiled for this torch, NumPy 1, setuptools below 81.',
            'mmpretrain 1.2.0': 'torchvision. With transformers 5 installed, `mmpretrain.models` '
            'cannot be imported (`NoneType takes no arguments`): transformers 4.46.3.',
            'mmpose 1.3.2': 'chumpy, which it asks for and does not import, does not build '
            "(`No module named 'pip'`): `pip install --no-deps mmpose`, then xtcocotools, "
            'json_tricks and munkres. The wheel of xtcocotools is compiled for NumPy 1 '
            '(`numpy.dtype size changed`).',
            'mmdet3d 1.4.0': 'Installs as it is. It imports mmpretrain where that is installed: '
            'see there.',
            'mmagic 1.2.0': 'Installs as it is and cannot be imported: it needs albumentations '
            'without asking for it (1.3.1), and diffusers as of its time: diffusers 0.24.0, '
            'huggingface_hub 0.25.2.',
            'mmaction2 1.1.0': 'The wheel of 1.2.0 lacks the package '
            '`mmaction.models.localizers.drn`, which it imports. 1.1.0 refuses mmcv 2.1.0 '
            '(below 2.1.0 is asked for): its `mmcv_maximum_version` was edited.',
            'mmocr 1.0.1': 'Refuses mmdet 3.3.0 (below 3.2.0 is asked for): its '
            '`mmdet_maximum_version` was edited. imgaug, which it imports, needs NumPy 1.',
            'mmrotate 1.0.0rc1': 'Refuses mmdet 3.3.0 (up to 3.1.0 is asked for), and imports '
            '`Sequence` from `collections`, which Python 3.10 removed: both lines were edited. '
            'e2cnn with `--no-deps`.',
            'mmyolo 0.6.0': 'Refuses mmcv 2.1.0 (below 2.1.0 is asked for): its '
            '`mmcv_maximum_version` was edited.',
        },
        older="""\
mmcv 2.0.1, which all of them accept, does not compile against this torch: its `setup.py` asks for
C++14, and the headers of torch for C++17.""",
        not_run='## What did not run',
        missing="""\
- mmagic's DCGAN and pix2pix: with any runner, `init_weights` of the models ends in
  `UnboundLocalError: cannot access local variable 'init_info'`. So no model of mmagic with several
  optimizers was trained.
- YOLOv5 in two processes: its model has synchronized batch normalization, which PyTorch's DDP
  under MMEngine's runner refuses on the CPU, so there is nothing to compare with.
- Configs named as `mmaction::…`: MMEngine fails in mmaction2's list of models
  (`'list' object has no attribute 'partition'`). Name the file, or the copy in a checkout.
- Configs named as `mmyolo::…`: MMEngine adds `_scope_` to `collate_fn`, which mmyolo's function
  does not take. Name the file.
- On the card, `voxelization` and `box_iou_rotated` of mmcv run on the host: see
  [operators of mmcv](mmcv_ops.md).""",
        again='## To run it again',
    ),
    zh_cn=dict(
        heading='# OpenMMLab 的其他库',
        links='[English](../en/openmmlab.md) | 简体中文',
        intro="""\
每个库取一个最小的模型，使用该库发布版自带的配置和少量与其数据集格式相同的样本，训练 {} 次迭代。
MMEngine 自带的 runner 在 CPU 上训练，我们的 runner 在 CPU 和 PrivateUse1 卡的替身上训练：
先用一个进程，再用两个进程（各占一半 batch）。没有 GPU 时，MMEngine 的 runner
不能自行启动两个进程：由测试创建进程组，并指定不带 `device_ids` 的封装。
表中数字是任意损失与同样进程数的 MMEngine runner 的最大差值；
0 表示逐位相同。宽度、深度、图像尺寸和学习率都很小，关闭数据增强、dropout
和同步批归一化，不包括验证。mmseg 和 mmdet 在每次改动时都在更多种类的设备上测试。""",
        headings=(
            '发布版',
            '配置',
            '损失（首次到末次）',
            'CPU',
            'CPU，2 个 rank',
            '卡',
            '卡，2 个 rank',
        ),
        measured='安装的版本：{}；没有尝试更新的版本。',
        installing='## 安装时的问题',
        library='库',
        needs='问题以及此处环境的做法',
        needed={
            '全部': '为该 torch 编译的 mmcv 2.1.0、NumPy 1、低于 81 的 setuptools。',
            'mmpretrain 1.2.0': '需要 torchvision。安装 transformers 5 时无法导入 '
            '`mmpretrain.models`（`NoneType takes no arguments`）：使用 transformers 4.46.3。',
            'mmpose 1.3.2': '它声明依赖 chumpy 但并不导入，而 chumpy 无法构建'
            "（`No module named 'pip'`）：使用 `pip install --no-deps mmpose`，再安装 "
            'xtcocotools、json_tricks 和 munkres。xtcocotools 的 wheel 为 NumPy 1 编译'
            '（`numpy.dtype size changed`）。',
            'mmdet3d 1.4.0': '可直接安装。如果安装了 mmpretrain，它会导入后者：见上。',
            'mmagic 1.2.0': '可直接安装但无法导入：需要未声明的 albumentations（1.3.1）以及当时的 '
            'diffusers：diffusers 0.24.0、huggingface_hub 0.25.2。',
            'mmaction2 1.1.0': '1.2.0 的 wheel 缺少它要导入的包 '
            '`mmaction.models.localizers.drn`。1.1.0 拒绝 mmcv 2.1.0（要求低于 2.1.0）：'
            '修改了 `mmcv_maximum_version`。',
            'mmocr 1.0.1': '拒绝 mmdet 3.3.0（要求低于 3.2.0）：修改了 `mmdet_maximum_version`。'
            '它导入的 imgaug 需要 NumPy 1。',
            'mmrotate 1.0.0rc1': '拒绝 mmdet 3.3.0（要求不高于 3.1.0），并从 `collections` 导入 '
            'Python 3.10 已移除的 `Sequence`：两行都已修改。e2cnn 使用 `--no-deps` 安装。',
            'mmyolo 0.6.0': '拒绝 mmcv 2.1.0（要求低于 2.1.0）：修改了 `mmcv_maximum_version`。',
        },
        older="""\
它们都接受的 mmcv 2.0.1 无法针对该 torch 编译：其 `setup.py` 要求 C++14，而 torch 的头文件要求
C++17。""",
        not_run='## 没有运行的部分',
        missing="""\
- mmagic 的 DCGAN 和 pix2pix：使用任何 runner 时，模型的 `init_weights` 都以
  `UnboundLocalError: cannot access local variable 'init_info'` 结束。因此没有训练 mmagic
  中带多个优化器的模型。
- 两个进程的 YOLOv5：模型带有同步批归一化，MMEngine runner 所用的 PyTorch DDP 在 CPU 上拒绝它，
  因此没有可比较的结果。
- 以 `mmaction::…` 命名的配置：MMEngine 在 mmaction2 的模型列表中出错
  （`'list' object has no attribute 'partition'`）。请写文件路径，或代码仓库中的副本。
- 以 `mmyolo::…` 命名的配置：MMEngine 在 `collate_fn` 中加入 mmyolo 的函数不接受的 `_scope_`。
  请写文件路径。
- 在卡上，mmcv 的 `voxelization` 和 `box_iou_rotated` 在主机上运行：
  见[mmcv 算子](mmcv_ops.md)。""",
        again='## 重新运行',
    ),
)


def render(texts: Dict[str, Any]) -> List[str]:
    """The parts of the page in one language."""
    found = json.loads(RESULTS.read_text(encoding='utf-8'))
    installed = found.pop('installed')
    rows = [
        [
            f'{row["package"]} {row["version"]}',
            f'`{row["config"]}`',
            f'{row["first"]:.4g} → {row["last"]:.4g}',
            *(_difference(row.get(measured)) for measured in MEASURED),
        ]
        for row in found.values()
    ]
    comma = '、' if texts is LANGUAGES['zh_cn'] else ', '
    return [
        texts['heading'],
        texts['links'],
        texts['intro'].format(found[next(iter(found))]['iterations']),
        table(texts['headings'], rows),
        texts['measured'].format(comma.join(f'{name} {installed[name]}' for name in installed)),
        texts['installing'],
        table((texts['library'], texts['needs']), [*map(list, texts['needed'].items())]),
        texts['older'],
        texts['not_run'],
        texts['missing'],
        texts['again'],
        COMMANDS,
    ]


def _difference(value: Optional[float]) -> str:
    if value is None:
        return '-'
    return f'{value:.1e}' if value else '0'


if __name__ == '__main__':
    write_pages('openmmlab.md', LANGUAGES, render)
