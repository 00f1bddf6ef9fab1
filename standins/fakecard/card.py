"""A stand-in for an eager accelerator that PyTorch knows only as PrivateUse1.

``card.install('zeta', count=4)`` builds the extension once (about 30 s), gives PrivateUse1 that
name and registers ``torch.zeta``. A process can install one name. As a module named in
``custom_imports``, ``fakecard_from_env`` installs the name in the variable ``FAKECARD_NAME``.
It is as strict as PyTorch's reference device, openreg; :class:`Variant` makes it poorer, as the
packages of some vendors are.
"""

import fcntl
import operator
import os
import shutil
import sys
import tempfile
import types
import zlib
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import NamedTuple, Tuple

import torch
from torch.utils import cpp_extension


def _missing():
    if not hasattr(torch.utils, 'generate_methods_for_privateuse1_backend'):
        return 'PyTorch before 2.1 has no PrivateUse1 devices with names'
    if not hasattr(torch, 'get_autocast_dtype'):
        return 'the stand-in card is written for PyTorch 2.4 and later'
    return None


#: Why a release of PyTorch cannot have this card; None where it can.
MISSING = _missing()


class Variant(NamedTuple):
    """What a card lacks.

    Attributes:
        hooks (bool): Whether its PrivateUse1HooksInterface has more than what a backward pass
            asks, without which ``torch.accelerator`` and ``torch.distributed.barrier`` fail.
        autocast (bool): Whether PyTorch's autocast takes it.
        without (tuple): Functions that its module lacks.
        kernels_left_out (tuple): Operators without a kernel.
        falls_back (bool): Whether PyTorch's fallback to the CPU takes operands of any devices.
    """

    hooks: bool = True
    autocast: bool = True
    without: Tuple[str, ...] = ()
    kernels_left_out: Tuple[str, ...] = ()
    falls_back: bool = False


#: The functions that pytorch_ocl's module lacks.
FIVE = ('is_available', 'device_count', 'current_device', 'set_device', 'get_rng_state')

#: By their names in the variable ``FAKECARD_VARIANT``.
VARIANTS = {
    'whole': Variant(),
    'plain': Variant(hooks=False, without=FIVE),
    'no_hooks': Variant(hooks=False),
    'no_functions': Variant(without=FIVE),
    'no_autocast': Variant(autocast=False),
    'no_kernels': Variant(
        kernels_left_out=('aten::convolution_overrideable', 'aten::native_batch_norm')
    ),
}


def build():
    """Compile the extension, or load it if it was compiled before."""
    return build_extension('fakecard', Path(__file__).with_name('fakecard.cpp'))


def build_extension(name, source):
    """Compile a C++ file as a Python extension, or load it if it was compiled before.

    Args:
        name (str): What the file's module is called.
        source (Path): The file.

    Returns:
        module: The extension.
    """
    asked = os.environ.get('FAKECARD_BUILD')
    whose = f'{source.read_text()} {sys.version} {torch.__version__}'
    place = f'{name}-{os.getuid()}-{torch.__version__}-{zlib.crc32(whose.encode()):08x}'
    folder = Path(asked or tempfile.gettempdir()) / place
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f'{name}.so'
    # PyTorch's own lock is a file that a killed process leaves behind, for which all others wait.
    with open(str(folder / 'mine'), 'w') as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not library.exists():
            building = folder / 'building'
            shutil.rmtree(str(building), ignore_errors=True)
            building.mkdir()
            flags = ['-O1', '-std=c++20']
            # PyTorch passes its folder to the linker unquoted, and that may hold a space.
            libraries, linked = cpp_extension.TORCH_LIB_PATH, building / 'torch_lib'
            linked.symlink_to(libraries)
            cpp_extension.TORCH_LIB_PATH = str(linked)
            try:
                extension = cpp_extension.load(
                    name, [str(source)], build_directory=str(building), extra_cflags=flags
                )
            finally:
                cpp_extension.TORCH_LIB_PATH = libraries
            os.replace(str(building / library.name), str(library))
            return extension
    spec = spec_from_file_location(name, str(library))
    extension = module_from_spec(spec)
    spec.loader.exec_module(extension)
    return extension


def install(name, count=4, variant=None):
    """Make ``count`` devices of type ``name``.

    Args:
        name (str): The name that PrivateUse1 gets.
        count (int): Number of devices, at most 16. Defaults to 4.
        variant (Variant, optional): Defaults to None: that of ``FAKECARD_VARIANT``.

    Returns:
        module: ``torch.<name>``.

    Raises:
        NotImplementedError: If this release of PyTorch cannot have the card; see :data:`MISSING`.
    """
    if MISSING:
        raise NotImplementedError(MISSING)
    variant = variant or VARIANTS[os.environ.get('FAKECARD_VARIANT', 'whole')]
    card = build()
    card.install(variant.hooks)
    card.leave_out(set(variant.kernels_left_out))
    card.fall_back(variant.falls_back)
    card.set_count(count)
    torch.utils.rename_privateuse1_backend(name)
    torch._register_device_module(name, _device_module(card, name, variant))
    torch.utils.generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_storage=True
    )
    return getattr(torch, name)


def _device_module(card, name, variant):
    def index(device):
        if device is None:
            return card.current_device()
        return device if isinstance(device, int) else torch.device(device).index or 0

    module = types.ModuleType(f'torch.{name}')
    module.is_available = lambda: card.device_count() > 0
    module.device_count = card.device_count
    module.current_device = card.current_device
    # An int alone, as in openreg.
    module.set_device = lambda device: card.set_device(operator.index(device))
    module.get_device_name = lambda device=None: 'fakecard'
    module.synchronize = lambda device=None: None
    module.device = lambda device: torch.accelerator.device_index(index(device))
    module.init = module.seed = module.seed_all = lambda: None
    module.is_initialized = lambda: True
    module.initial_seed = torch.initial_seed
    module.get_rng_state_all = lambda: [torch.get_rng_state()] * card.device_count()
    module.set_rng_state_all = lambda states: torch.set_rng_state(states[-1])
    module.empty_cache = card.empty_cache
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = module.manual_seed = lambda seed: None
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module.memory_allocated = lambda device=None: card.memory_allocated(index(device))
    module.max_memory_allocated = module.memory_allocated
    module.set_limit = card.set_limit
    module.mem_get_info = lambda device=None: (
        (card.memory_limit() - card.memory_allocated(index(device)), card.memory_limit())
        if card.memory_limit()
        else None
    )
    if variant.autocast:
        module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    for function in variant.without:
        delattr(module, function)
    return module
