"""Results of tests, a JSON file for each kind of device, for the scripts that write tables."""

import json
from pathlib import Path
from typing import Any, Dict

#: What docs call the kinds of devices, in the order of columns.
COLUMNS: Dict[str, Dict[str, str]] = dict(
    en=dict(
        cpu='CPU',
        xla='torch_xla',
        gcu='T20 on torch_xla (stand-in)',
        t20='T20, PyTorch 1.10 (stand-in)',
        zeta='PrivateUse1 card (stand-in)',
        npu='NPU with hccl (stand-in)',
    ),
    zh_cn=dict(
        cpu='CPU',
        xla='torch_xla',
        gcu='torch_xla 上的 T20（替身）',
        t20='T20，PyTorch 1.10（替身）',
        zeta='PrivateUse1 卡（替身）',
        npu='NPU 与 hccl（替身）',
    ),
)


def load(folder: Path) -> Dict[str, Dict[str, Any]]:
    """The columns that were measured, by accelerator."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob('*.json'))]
    return {column['accelerator']: column for column in found}


def versions(columns: Dict[str, Dict[str, Any]], titles: Dict[str, str]) -> str:
    """With which torch each column was measured."""
    shown = [name for name in titles if name in columns]
    return '; '.join(f'{titles[name]}: torch {columns[name]["torch"]}' for name in shown)
