"""Write ``docs/en/mmcv_ops.md`` and ``docs/zh_cn/mmcv_ops.md`` from what the tests found.

The tests in ``tests/patches/mmcv_ops`` write one JSON file for each kind of device. Which other
devices an operator has kernels for is read from the sources that mmcv is installed with.
"""

import json
import re
from pathlib import Path
from typing import Any, Dict, List, Set

DOCS = Path(__file__).parent
RESULTS = DOCS / 'mmcv_ops'
#: Folders of mmcv's sources, and whose kernels they hold.
VENDORS = dict(cuda='CUDA', mlu='MLU', npu='NPU', mps='MPS')
DEVICES = ('zeta', 'xla', 'gcu')

COMMANDS = """```bash
MMDEVPLUG_RESULTS=docs/mmcv_ops python -m pytest tests/patches/mmcv_ops -m "not xla and not tpu"
MMDEVPLUG_RESULTS=docs/mmcv_ops PJRT_DEVICE=CPU python -m pytest tests/patches/mmcv_ops -m xla
python docs/mmcv_ops_table.py
```"""

OPTION = """```python
accelerator = dict(type='gcu', mmcv_ops='host')  # or 'error'
```"""

LOG = """```text
WARNING - The mmcv operator roi_align_forward has no kernel for gcu:0 (used in
roi_head.bbox_roi_extractor.roi_layers.0 (RoIAlign), .../single_level_roi_extractor.py:107): it
runs on the host. ...
INFO - Operators of mmcv that ran on the host so far, on rank 0:
operator              calls  MB fetched   MB sent  seconds
roi_align_forward         2        0.03      0.13     0.01
roi_align_backward        2        0.13      0.03     0.01
nms                       4        0.01      0.00     0.01
```"""

SCRIPT = """```python
import mmcv.ops
from mmdevplug import get_accelerator
from mmdevplug.patches.mmcv_ops import host_use, patch_mmcv_ops

patch_mmcv_ops(get_accelerator('gcu'))
mmcv.ops.nms(boxes, scores, 0.5)  # tensors on gcu:0
print(host_use())
```"""

LANGUAGES: Dict[str, Dict[str, Any]] = dict(
    en=dict(
        heading="# mmcv's operators on devices without a kernel for them",
        intro="""\
The operators of `mmcv.ops` (`nms`, `RoIAlign`, deformable convolution and so on) are compiled for
the CPU and, depending on the build, for CUDA or one vendor's card. On any other device mmcv stops
with "implementation for device ... not found" or ends the process. Under this package's runner an
operator without a kernel runs on the host: its tensors are copied there, mmcv's CPU kernel
computes, and the results are copied back. Backward does the same, so models train.""",
        option="""\
`'host'` is the default. `'error'` stops all ranks at the first such operator and names it, the
device and the module. Where a kernel exists it is used: in a build of mmcv with kernels for the
device each operator is tried, and only one that says it has none goes to the host. On the CPU,
whose kernels take no half precision, that is computed in float32 and rounded, so mixed precision
works there, too. Nothing is done with `mmcv-lite`, which has no operators. mmcv is not edited: the
functions of `mmcv._ext` are replaced in the process when a job begins, and `restore_mmcv_ops()`
puts them back.""",
        log="""\
The log names each operator when it is first used, and has a table every 1,000 iterations
(`custom_hooks = [dict(type='MMCVOpsHook', interval=100)]` for others) and at the end of training,
validation and testing:""",
        script='In a script without a runner, for inference for example:',
        cost_heading='## What it costs',
        cost="""\
- A call copies what the operator reads to the host, and what it writes back; what it only writes
  to is not fetched. The device waits meanwhile. The table in the log has bytes and seconds.
- On a lazy device (torch_xla, T20) all inputs come in one copy, which is one graph execution for a
  call, and one for a call in backward (deformable convolution makes two there). Everything
  recorded by then runs in it, so that nothing is computed again later. The seconds hold that
  execution, and its compilation the first time.
- float16 and bfloat16 are computed in float32 on the host and rounded afterwards.""",
        table_heading='## Operators with a CPU kernel',
        table="""\
*Same bits*: results and gradients have the bits of the CPU. The last column lists whose kernels
mmcv's sources have; there the operator runs natively in a build for that device. That was not
tried: no such device was at hand.""",
        operator='operator',
        titles=dict(zeta='PrivateUse1 card (stand-in)', xla='torch_xla', gcu='GCU T20 (stand-in)'),
        native='native kernels',
        same='same bits',
        differs='differs',
        untried='not tried',
        lacking_heading='## Operators without one',
        lacking="""\
These have no CPU kernel in mmcv, so they stop with an error that says so on every device without a
kernel of its own. For some of them model libraries have a variant in PyTorch, which they take by
themselves off CUDA: mmdet's focal loss, mmcv's `MultiScaleDeformableAttention`, `upfirdn2d`,
`bias_act`, `filtered_lrelu` and `fused_bias_leakyrelu`. Some ask for CUDA in their Python code and
stop there with an error of PyTorch's: `knn`, `furthest_point_sample`, `points_in_boxes_part` and
`points_in_boxes_all`.""",
        limits_heading='## Limits',
        limits="""\
- `soft_nms` and `nms_match` copy to the host by themselves on every device, CUDA too, and are not
  counted.
- `bbox_overlaps` has a gradient on the CPU alone; on CUDA it has none either.
- `nms_rotated` and `nms_quadri`: torch_xla 2.9 aborts the process in `index_select`, before the
  operator is reached. They were not tried on torch_xla and the T20.
- On `npu` (and `mlu`) mmcv prepares the arguments of `box_iou_rotated` (and `nms_rotated`) for the
  vendor's kernel, so without that kernel they are refused.
- Operands on two devices are refused.""",
        measured='Measured with mmcv {mmcv}; {torch}.',
        again='## To measure again',
    ),
    zh_cn=dict(
        heading='# mmcv 算子在没有对应内核的设备上',
        intro="""\
`mmcv.ops` 的算子（`nms`、`RoIAlign`、可变形卷积等）编译了 CPU 内核，视构建而定还有 CUDA 或某一厂商
设备的内核。在其他设备上，mmcv 会以 "implementation for device ... not found" 停止，或使进程退出。
使用本包的 runner 时，没有内核的算子在主机上运行：张量复制到主机，由 mmcv 的 CPU 内核计算，结果复制
回设备。反向传播同样如此，因此模型可以训练。""",
        option="""\
默认为 `'host'`。`'error'` 使所有 rank 在第一个这样的算子处停止，并指出算子、设备和模块。
有内核的地方使用内核：若 mmcv 的构建含有该设备的内核，则逐个尝试算子，只有明确表示没有内核的算子
才到主机上运行。CPU 的内核不接受半精度，因此在 CPU 上以 float32 计算后舍入，混合精度在那里也能用。
没有算子的 `mmcv-lite` 下不做任何事。mmcv 本身不被修改：作业开始时在
进程中替换 `mmcv._ext` 的函数，`restore_mmcv_ops()` 可恢复。""",
        log="""\
日志在每个算子首次使用时指出它，每 1,000 次迭代（可用
`custom_hooks = [dict(type='MMCVOpsHook', interval=100)]` 更改）以及训练、验证、测试结束时
给出一张表：""",
        script='在没有 runner 的脚本中，例如推理：',
        cost_heading='## 代价',
        cost="""\
- 每次调用把算子读取的数据复制到主机，把写入的数据复制回设备；只写不读的不取回。其间设备等待。
  日志中的表给出字节数和秒数。
- 在惰性设备（torch_xla、T20）上，所有输入一次取回，即每次调用执行一次图，反向中的每次调用也是一次
  （可变形卷积在反向中有两次）。此前记录的所有操作都在这次执行中完成，之后不会重复计算。秒数包含这次执行，
  首次还包含编译。
- float16 和 bfloat16 在主机上以 float32 计算，然后舍入。""",
        table_heading='## 有 CPU 内核的算子',
        table="""\
*逐位相同*：结果和梯度与 CPU 逐位相同。最后一列是 mmcv 源码中含有哪些设备的内核；在为该设备构建的
mmcv 中，算子直接在设备上运行。这一点未经试验：手边没有这些设备。""",
        operator='算子',
        titles=dict(zeta='PrivateUse1 卡（替身）', xla='torch_xla', gcu='GCU T20（替身）'),
        native='原生内核',
        same='逐位相同',
        differs='不同',
        untried='未试',
        lacking_heading='## 没有 CPU 内核的算子',
        lacking="""\
这些算子在 mmcv 中没有 CPU 内核，因此在没有自己内核的设备上会停止，错误信息会说明这一点。其中一些在
模型库中有 PyTorch 实现，在 CUDA 以外会自动使用：mmdet 的 focal loss，mmcv 的
`MultiScaleDeformableAttention`、`upfirdn2d`、`bias_act`、`filtered_lrelu` 和
`fused_bias_leakyrelu`。另一些在 Python 代码中就要求 CUDA，会以 PyTorch 的错误停止：`knn`、
`furthest_point_sample`、`points_in_boxes_part` 和 `points_in_boxes_all`。""",
        limits_heading='## 限制',
        limits="""\
- `soft_nms` 和 `nms_match` 在所有设备（包括 CUDA）上都由 mmcv 自己复制到主机，不计入统计。
- `bbox_overlaps` 只在 CPU 上有梯度；在 CUDA 上同样没有。
- `nms_rotated` 和 `nms_quadri`：torch_xla 2.9 在到达算子之前，就在 `index_select` 中使进程退出。
  它们未在 torch_xla 和 T20 上试过。
- 在 `npu`（和 `mlu`）上，mmcv 为厂商内核准备 `box_iou_rotated`（和 `nms_rotated`）的参数，因此没有
  该内核时拒绝运行。
- 操作数位于两个设备上时拒绝运行。""",
        measured='测量环境：mmcv {mmcv}；{torch}。',
        again='## 重新测量',
    ),
)


def load() -> Dict[str, Dict[str, Any]]:
    """What was found, by kind of device."""
    return {
        name: json.loads((RESULTS / f'{name}.json').read_text(encoding='utf-8'))
        for name in DEVICES
    }


def group(function: str) -> str:
    """The operator that a function of the extension belongs to."""
    return re.sub(r'(_coor)?_(forward|backward).*', '', function)


def native_kernels(functions: Set[str]) -> Dict[str, Set[str]]:
    """Whose kernels mmcv's sources have, by operator.

    Args:
        functions (set): Names in the extension.
    """
    import mmcv

    sources = Path(mmcv.__file__).parent / 'ops' / 'csrc' / 'pytorch'
    registered = {title: _registered(sources / folder) for folder, title in VENDORS.items()}
    bindings = (sources / 'pybind.cpp').read_text(encoding='utf-8')
    defined = dict(re.findall(r'm\.def\(\s*"(\w+)",\s*&(\w+)', bindings))
    found: Dict[str, Set[str]] = {group(name): set() for name in functions}
    for path in sources.glob('*.cpp'):
        text = path.read_text(encoding='utf-8')
        keys = set(re.findall(r'DISPATCH_DEVICE_IMPL\(\s*(\w+)', text))
        for function in functions:
            name = defined[function]
            if path.name == 'pybind.cpp' or not re.search(rf'\b{name}\s*\([^;]*?\{{', text):
                continue
            wanted = {f'{name}_impl'} & keys or keys
            for title, names in registered.items():
                # A few do not ask the registry.
                direct = re.search(rf'\b{name}_{title.lower()}\b', text) is not None
                if wanted & names or direct:
                    found[group(function)].add(title)
    return found


def _registered(folder: Path) -> Set[str]:
    text = '\n'.join(
        path.read_text(encoding='utf-8') for path in folder.glob('*') if path.is_file()
    )
    return set(re.findall(r'REGISTER_\w+_IMPL\(\s*(\w+)', text))


def render(found: Dict[str, Dict[str, Any]], texts: Dict[str, Any]) -> str:
    """The page in one language."""
    card = found['zeta']
    native = native_kernels({*card['same'], *card['lacking']})
    served = sorted({group(name) for name in card['same']})
    titles = [texts['titles'][name] for name in DEVICES]
    rows = [_line([texts['operator'], *titles, texts['native']]), _line(['---'] * 5)]
    for operator in served:
        cells = [_cell(found[name]['same'], operator, texts) for name in DEVICES]
        rows.append(_line([f'`{operator}`', *cells, _vendors(native[operator])]))
    lacking = sorted({group(name) for name in card['lacking']} - set(served))
    listed = [f'`{name}` ({_vendors(native[name])})' for name in lacking]
    versions = '; '.join(
        f'{texts["titles"][name]}: torch {found[name]["torch"]}' for name in DEVICES
    )
    return '\n\n'.join(
        [
            texts['heading'],
            texts['intro'],
            OPTION,
            texts['option'],
            texts['log'],
            LOG,
            texts['script'],
            SCRIPT,
            texts['cost_heading'],
            texts['cost'],
            texts['table_heading'],
            texts['table'],
            '\n'.join(rows),
            texts['measured'].format(mmcv=card['mmcv'], torch=versions),
            texts['lacking_heading'],
            texts['lacking'],
            ', '.join(listed) + '.',
            texts['limits_heading'],
            texts['limits'],
            texts['again'],
            COMMANDS,
        ]
    )


def _cell(same: Dict[str, bool], operator: str, texts: Dict[str, Any]) -> str:
    values = [bits for name, bits in same.items() if group(name) == operator]
    if not values:
        return texts['untried']
    return texts['same'] if all(values) else texts['differs']


def _vendors(titles: Set[str]) -> str:
    return ', '.join(title for title in VENDORS.values() if title in titles) or '-'


def _line(cells: List[str]) -> str:
    return f'| {" | ".join(cells)} |'


def main() -> None:
    """Write both pages."""
    found = load()
    for language, texts in LANGUAGES.items():
        path = DOCS / language / 'mmcv_ops.md'
        path.write_text(render(found, texts) + '\n', encoding='utf-8')
        print(f'wrote {path}')


if __name__ == '__main__':
    main()
