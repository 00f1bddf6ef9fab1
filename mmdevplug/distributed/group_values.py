"""Keep what was made or measured for a process group for as long as the group exists."""

from typing import Any, Dict
from weakref import WeakKeyDictionary

from torch import distributed as torch_dist

from mmdevplug.utils.annotations import AnyGroup

_BY_GROUP: 'WeakKeyDictionary[object, Dict[str, object]]' = WeakKeyDictionary()


def values_of_group(group: AnyGroup) -> Dict[str, Any]:
    """The values of a process group by name, None for the default one; callers may add some."""
    return _BY_GROUP.setdefault(torch_dist.group.WORLD if group is None else group, {})
