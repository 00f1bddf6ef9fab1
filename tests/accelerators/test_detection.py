"""Which accelerator is chosen and why, and what is said where none can be."""

import sys
import types

import pytest
import torch
from mmengine.registry import DefaultScope

from mmdevplug.accelerators import (
    CPUAccelerator,
    DeviceContext,
    S60Accelerator,
    T20Accelerator,
    available_accelerators,
    choose_accelerator,
    get_accelerator,
    set_device_context,
)
from mmdevplug.accelerators.context import current_accelerator
from mmdevplug.accelerators.detection import DETECTION_ORDER, ENVIRONMENT_VARIABLE
from mmdevplug.accelerators.torch_native import FAMILIES
from mmdevplug.errors import AcceleratorError
from mmdevplug.registry import ACCELERATORS

VENDORS = {'torch_xla', 'torch_gcu', *(f.package for f in FAMILIES.values() if f.package)}


@pytest.fixture(autouse=True)
def no_vendor(monkeypatch):
    """A machine with no card and no vendor's package, whatever runs these tests."""
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    for package in VENDORS:
        monkeypatch.setitem(sys.modules, package, None)
    for name in ('cuda', 'xpu', 'mps'):
        if hasattr(torch, name):
            monkeypatch.setattr(getattr(torch, name), 'is_available', lambda: False, raising=False)
    set_device_context(None)
    yield
    set_device_context(None)


@pytest.fixture
def vendor_package(tmp_path, monkeypatch):
    """Install a vendor's package of one line."""

    def install(package, source):
        folder = tmp_path.joinpath(*package.split('.'))
        folder.mkdir(parents=True)
        (folder / '__init__.py').write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path))
        # Leaves what the import puts there to be undone.
        monkeypatch.delitem(sys.modules, package, raising=False)

    return install


def card_module(**functions):
    """A module as vendors attach it to torch."""
    module = types.ModuleType('card')
    module.is_available = lambda: True
    module.device_count = lambda: 2
    for name, function in functions.items():
        setattr(module, name, function)
    return module


def refusal(config):
    with pytest.raises(AcceleratorError) as caught:
        choose_accelerator(config)
    return str(caught.value)


@pytest.mark.parametrize('config', [None, 'auto', {}, dict(type='auto'), dict(type=None)])
def test_cpu_is_detected_where_there_is_nothing_else(config):
    choice = choose_accelerator(config)
    assert isinstance(choice.accelerator, CPUAccelerator)
    assert choice.reason == 'detected: 1 cpu device(s)'


@pytest.mark.parametrize('config', [None, 'auto', dict(type='auto')])
def test_environment_wins_over_detection(monkeypatch, config):
    monkeypatch.setattr(torch, 'mlu', card_module(), raising=False)
    assert choose_accelerator(config).reason == 'detected: 2 mlu device(s)'
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, 'cpu')
    choice = choose_accelerator(config)
    assert choice.accelerator.name == 'cpu'
    assert choice.reason == 'environment variable MMDEVPLUG_ACCELERATOR=cpu'


@pytest.mark.parametrize('config', ['cpu', dict(type='cpu')])
@pytest.mark.parametrize('value', ['mlu', 'nonsense'])
def test_config_wins_over_environment_and_detection(monkeypatch, config, value):
    monkeypatch.setattr(torch, 'mlu', card_module(), raising=False)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, value)
    choice = choose_accelerator(config)
    assert choice.accelerator.name == 'cpu'
    assert choice.reason == "accelerator.type='cpu'"


@pytest.mark.parametrize('value', ['', '  ', 'auto', ' auto '])
def test_empty_environment_leaves_it_to_detection(monkeypatch, value):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, value)
    assert choose_accelerator().reason.startswith('detected: ')


def test_spaces_around_the_name_in_the_environment_do_no_harm(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, ' cpu ')
    assert choose_accelerator().accelerator.name == 'cpu'


def test_object_is_taken_as_it_is(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, 'nonsense')
    accelerator = CPUAccelerator()
    assert choose_accelerator(accelerator) == (accelerator, 'given as an object')


def test_config_is_not_changed():
    config = dict(type='cpu')
    choose_accelerator(config)
    assert config == dict(type='cpu')


def test_get_accelerator_gives_the_chosen_one(monkeypatch):
    assert get_accelerator().name == 'cpu'
    monkeypatch.setattr(torch, 'npu', card_module(), raising=False)
    assert get_accelerator().name == 'npu'
    assert get_accelerator('cpu').name == 'cpu'


def test_cards_come_before_the_cpu(monkeypatch):
    monkeypatch.setattr(torch, 'mlu', card_module(), raising=False)
    monkeypatch.setattr(torch, 'npu', card_module(), raising=False)
    assert available_accelerators() == ['npu', 'mlu', 'cpu']
    assert DETECTION_ORDER[-1] == 'cpu'


@pytest.mark.parametrize(
    'functions', [dict(is_available=lambda: False), dict(device_count=lambda: 0)]
)
def test_family_without_a_device_is_passed_over(monkeypatch, functions):
    monkeypatch.setattr(torch, 'mlu', card_module(**functions), raising=False)
    assert available_accelerators() == ['cpu']


@pytest.mark.parametrize(('there', 'detected'), [(False, 'cpu'), (True, 'mps')])
def test_a_module_that_tells_nothing_is_answered_for_by_its_backend(monkeypatch, there, detected):
    """As `torch.mps` of PyTorch 2.1, on machines with and without such a device."""
    monkeypatch.setattr(torch, 'mps', types.ModuleType('mps'), raising=False)
    backend = types.SimpleNamespace(is_available=lambda: there)
    monkeypatch.setattr(torch.backends, 'mps', backend, raising=False)
    assert choose_accelerator().reason == f'detected: 1 {detected} device(s)'


def test_registered_accelerator_is_detected_before_all_others(monkeypatch):
    class OwnAccelerator(CPUAccelerator):
        name = 'own'

    monkeypatch.setitem(ACCELERATORS.module_dict, 'own', OwnAccelerator)
    assert choose_accelerator().accelerator.name == 'own'
    assert available_accelerators() == ['own', 'cpu']


def test_accelerator_that_is_not_preferred_has_to_be_asked_for(monkeypatch):
    class ShyAccelerator(CPUAccelerator):
        name = 'shy'

        def is_preferred(self):
            return False

    monkeypatch.setitem(ACCELERATORS.module_dict, 'shy', ShyAccelerator)
    assert choose_accelerator().accelerator.name == 'cpu'
    assert choose_accelerator('shy').accelerator.name == 'shy'
    assert 'shy' in available_accelerators()


def test_current_accelerator_is_the_one_that_was_set():
    assert current_accelerator().name == 'cpu'
    accelerator = CPUAccelerator()
    set_device_context(DeviceContext(accelerator, 'a test', accelerator.device(0)))
    assert current_accelerator() is accelerator


def test_unknown_name_is_refused_with_those_there_are():
    message = refusal('nvidia')
    assert message.startswith(
        "accelerator.type names the accelerator 'nvidia', which is unknown; did you mean 'cuda'?"
    )
    for name in DETECTION_ORDER:
        assert name in message
    assert 'usable here: cpu' in message
    assert "accelerator=dict(type='nvidia', package=...)" in message


def test_unknown_name_in_the_environment_is_refused_with_the_variable(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, 'nvidia')
    assert refusal(None).startswith("MMDEVPLUG_ACCELERATOR names the accelerator 'nvidia'")


@pytest.mark.parametrize(
    ('name', 'needed', 'variable'),
    [
        ('npu', 'the package torch_npu', 'ASCEND_RT_VISIBLE_DEVICES'),
        ('mlu', 'the package torch_mlu', 'MLU_VISIBLE_DEVICES'),
        ('musa', 'the package torch_musa', None),
        ('sdaa', 'the package torch_sdaa', 'SDAA_VISIBLE_DEVICES'),
        ('neuron', 'the package torch_neuronx', 'NEURON_RT_VISIBLE_CORES'),
        ('tpu', 'the package torch_tpu', 'TPU_VISIBLE_CHIPS'),
        ('hpu', 'the package habana_frameworks.torch', None),
        ('gcu', 'torch_gcu', 'TOPS_VISIBLE_DEVICES'),
        ('xla', 'the package torch_xla', None),
        ('cuda', 'a PyTorch build with cuda support', None),
        ('xpu', 'torch.xpu', 'ZE_AFFINITY_MASK'),
        ('mps', 'torch.mps', None),
    ],
)
def test_absent_family_is_refused_with_what_it_needs(monkeypatch, name, needed, variable):
    message = refusal(name)
    assert message.startswith(f'accelerator.type names the accelerator {name!r}')
    assert needed in message
    assert 'Usable here: cpu' in message
    if variable is not None:
        monkeypatch.delenv(variable, raising=False)
        assert f'{variable} is not set' in refusal(name)
        monkeypatch.setenv(variable, '0,1')
        assert f"{variable}='0,1'" in refusal(name)


def test_package_of_an_unknown_family_is_asked_for():
    message = refusal(dict(type='zeta', package='torch_zeta_that_nobody_has'))
    assert 'the package torch_zeta_that_nobody_has' in message


@pytest.mark.parametrize(
    ('name', 'config', 'reason'),
    [
        ('zeta', dict(type='zeta', package='torch_zeta'), "accelerator.type='zeta'"),
        ('mlu', None, 'detected: 8 mlu device(s)'),
    ],
)
def test_package_is_imported_before_the_device_is_looked_for(
    vendor_package, monkeypatch, name, config, reason
):
    monkeypatch.setitem(sys.modules, f'torch_{name}', None)
    vendor_package(
        f'torch_{name}',
        f"import torch, types\ntorch.{name} = types.ModuleType('torch.{name}')\n"
        f'torch.{name}.is_available = lambda: True\ntorch.{name}.device_count = lambda: 8\n',
    )
    monkeypatch.setattr(torch, name, None, raising=False)
    choice = choose_accelerator(config)
    assert (choice.accelerator.device_count(), choice.reason) == (8, reason)
    assert f'torch_{name}' in sys.modules


@pytest.mark.parametrize('package', ['torch_npu', 'torch_gcu', 'torch_xla'])
@pytest.mark.parametrize(
    'error', ['ImportError', 'RuntimeError', 'OSError', 'AttributeError', 'KeyError']
)
def test_broken_package_is_refused_with_its_own_words(vendor_package, package, error):
    vendor_package(package, f'raise {error}("libascendcl.so: cannot open")')
    message = refusal(package.split('_')[1])
    assert f'the package {package!r} is installed' in message
    assert f'{error}: ' in message
    assert 'libascendcl.so: cannot open' in message
    assert sys.executable in message
    with pytest.raises(AcceleratorError) as caught:
        get_accelerator(package.split('_')[1])
    assert type(caught.value.__cause__).__name__ == error


def test_package_that_misses_another_one_is_refused_with_its_name(vendor_package):
    vendor_package('torch_npu', 'import a_module_that_nobody_has')
    message = refusal('npu')
    assert "ModuleNotFoundError: No module named 'a_module_that_nobody_has'" in message


@pytest.mark.parametrize('error', ['ImportError', 'RuntimeError', 'OSError'])
def test_broken_package_leaves_no_silent_way_to_the_cpu(vendor_package, error):
    vendor_package('torch_npu', f'raise {error}("driver too old")')
    message = refusal(None)
    assert f"'torch_npu' is installed for {sys.executable}" in message
    assert f'{error}: driver too old' in message
    assert "accelerator='cpu'" in message
    assert choose_accelerator('cpu').accelerator.name == 'cpu'
    with pytest.warns(UserWarning, match='driver too old'):
        assert available_accelerators() == ['cpu']


def test_broken_package_does_not_hide_a_usable_card(vendor_package, monkeypatch):
    vendor_package('torch_npu', 'raise RuntimeError("driver too old")')
    monkeypatch.setattr(torch, 'mlu', card_module(), raising=False)
    with pytest.warns(UserWarning, match='driver too old'):
        assert choose_accelerator().accelerator.name == 'mlu'


def test_package_without_a_device_is_refused_by_name_and_passed_over(vendor_package, recwarn):
    vendor_package('torch_npu', '')
    assert choose_accelerator().accelerator.name == 'cpu'
    assert 'no such device can be used' in refusal('npu')
    assert not [w for w in recwarn if 'torch_npu' in str(w.message)]


def test_a_function_registers_what_the_import_does_not(vendor_package, monkeypatch):
    vendor_package(
        'torch_late',
        'import torch, types\ncalls = []\n'
        'def register():\n'
        '    calls.append(1)\n'
        '    torch.late = types.SimpleNamespace(device_count=lambda: 2)\n'
        'def fail():\n    raise OSError("no driver")\n',
    )
    monkeypatch.setattr(torch, 'late', None, raising=False)
    config = dict(type='late', package='torch_late', register='torch_late:register')
    accelerator = get_accelerator(config)
    assert accelerator.is_available()
    assert accelerator.device_count() == 2
    assert sys.modules['torch_late'].calls == [1]
    for wrong, words in {
        'torch_late': "expected a function to call after the import of the package, e.g. '",
        'torch_late:fail': 'fails with OSError: no driver',
        'torch_late:absent': 'AttributeError',
        'torch_never:register': 'ModuleNotFoundError',
    }.items():
        assert words in refusal(dict(config, register=wrong))


@pytest.mark.parametrize('name', ['cpu', 'cuda', 'npu', 'xla', 'gcu'])
def test_option_that_an_accelerator_does_not_take_is_refused_with_its_name(name):
    message = refusal(dict(type=name, colour='red'))
    assert message.startswith(f'accelerator=dict(type={name!r}, ...)')
    assert "['colour']" in message
    assert 'Correct the name or remove it' in message


def test_error_inside_an_accelerator_is_not_taken_for_a_wrong_option(monkeypatch):
    class Broken(CPUAccelerator):
        def __init__(self, colour='red'):
            super().__init__()
            len(colour, 3)

    def build_broken():
        raise OSError('no driver')

    monkeypatch.setitem(ACCELERATORS.module_dict, 'broken', Broken)
    monkeypatch.setitem(ACCELERATORS.module_dict, 'driverless', build_broken)
    message = refusal(dict(type='broken', colour='blue'))
    assert message.startswith("building accelerator 'broken' fails with ")
    assert 'test_detection.py:' in message
    assert 'TypeError: len() takes exactly one argument' in message
    assert 'option' not in message
    assert 'has an option it does not take' in refusal(dict(type='broken', color='blue'))
    with pytest.warns(UserWarning, match="'driverless' fails with OSError: no driver"):
        assert 'cpu' in available_accelerators()


@pytest.mark.parametrize('generation', ['T20', 's70', '', 20])
def test_wrong_gcu_generation_is_refused_with_the_right_ones(generation):
    message = refusal(dict(type='gcu', generation=generation))
    assert message.startswith(f'accelerator.generation={generation!r}')
    assert "'t20'" in message
    assert "'s60'" in message


@pytest.mark.parametrize('generation', [None, 't20', 's60'])
def test_gcu_without_its_package_is_refused(generation):
    message = refusal(dict(type='gcu', generation=generation))
    assert "accelerator.type names the accelerator 'gcu'" in message
    assert 'torch_gcu' in message


GCU = (
    'import torch, types\n'
    'is_available = lambda: True\n'
    'device_count = lambda: 8\n'
    "get_device_name = lambda index=None: 'T20'\n"
    'sync_lived_tensor = lambda device=None: None\n'
)


@pytest.mark.parametrize('set_torch_gcu', [False, True])
def test_gcu_package_that_runs_graphs_is_the_lazy_generation(
    vendor_package, monkeypatch, set_torch_gcu
):
    vendor_package('torch_gcu', GCU)
    if set_torch_gcu:  # as scripts do that want `torch.gcu` on both generations
        monkeypatch.setattr(torch, 'gcu', card_module(), raising=False)
    accelerator = get_accelerator('gcu')
    assert isinstance(accelerator, T20Accelerator)
    assert (accelerator.device_type, accelerator.device_count()) == ('xla', 8)
    assert choose_accelerator().reason == 'detected: 8 gcu device(s)'


def test_gcu_package_with_torch_gcu_module_is_the_eager_generation(vendor_package, monkeypatch):
    vendor_package('torch_gcu', '')
    monkeypatch.setattr(torch, 'gcu', card_module(), raising=False)
    accelerator = get_accelerator('gcu')
    assert isinstance(accelerator, S60Accelerator)
    assert (accelerator.device_type, accelerator.device_count()) == ('gcu', 2)


def test_gcu_generation_of_the_config_wins(vendor_package, monkeypatch):
    vendor_package('torch_gcu', GCU)
    monkeypatch.setattr(torch, 'gcu', card_module(), raising=False)
    assert isinstance(get_accelerator(dict(type='gcu', generation='t20')), T20Accelerator)
    assert isinstance(get_accelerator(dict(type='gcu', generation='s60')), S60Accelerator)


def test_nothing_is_said_of_the_scope_of_a_model_library(monkeypatch):
    said = []
    monkeypatch.setattr('mmengine.logging.print_log', lambda *args, **_: said.append(args[0]))
    with DefaultScope.overwrite_default_scope('mmseg'):
        assert get_accelerator('cpu').name == 'cpu'
    assert not [message for message in said if 'Failed to' in message]
