"""Which tests run in which target, and which of them in the gate.

``make test`` has one test of each kind, on the devices that take different paths through the
code: a native card, a card without a backend, a lazy device. What is listed here takes more than
some three seconds of a core and is of a kind that has a quicker test there: ``make test-long``,
``make test-xla`` and ``make test-t20`` run it. The gate runs one case of each kind of it
(``--one-of-each``), and all of ``make test``. PyTorch 1.10 repeats the files of tests whose code
does something else there (``--with-branches``).
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / 'mmdevplug'

#: Beginnings of the names of tests, below ``tests/``.
LONG = (
    # The table of MMEngine's assumptions, of which a page is made.
    'sites/test_sites.py',
    # Equality with one process, which gradients/test_wrapper_parity.py looks at.
    'optim/test_training.py::test_weights_equal_those_of_one_process[cpu',
    'optim/test_training.py::test_bfloat16_comes_close_to_one_process_and_is_not_float32[cpu',
    'optim/test_training.py::test_logged_norm_is_that_of_its_iteration[cpu',
    'optim/test_training.py::test_weights_equal_those_of_one_process[npu',
    'optim/test_training.py::test_scenarios_differ_from_each_other',
    'optim/test_mixed_precision.py::test_all_ranks_skip_the_step_in_which_one_overflowed[cpu',
    'optim/test_mixed_precision.py::test_all_ranks_skip_the_step_in_which_one_overflowed[zeta',
    'runner/test_digits.py::test_accuracy[cpu',
    'runner/test_digits.py::test_accuracy[lazy',
    'runner/test_digits.py::test_weights_equal_those_of_one_process[cpu',
    'sharding/test_training.py::test_cards_train_as_one_process',
    'sharding/test_training.py::test_two_copies_of_two_ranks',
    'sharding/test_training.py::test_weights_on_the_host_train_as_one_process[streams',
    'sharding/test_training.py::test_weights_on_the_host_train_as_one_process[npu-1',
    'sharding/test_training.py::test_mixed_precision_is_that',
    'sharding/test_checkpoints.py::test_a_resumed_run_is_the_run_that_was_interrupted[True',
    'repos/test_mmdet.py::test_tools_train_of_mmdet_itself',
    'repos/test_mmseg.py::test_tools_',
    # Resuming: one of each kind on the card without a backend or on the CPU stays.
    'checkpoint/test_exact_resume.py::test_a_single_process[True-20',
    'checkpoint/test_exact_resume.py::test_a_single_process[True-9',
    'checkpoint/test_exact_resume.py::test_a_single_process[False',
    'checkpoint/test_exact_resume.py::test_several_ranks[True-4',
    'checkpoint/test_exact_resume.py::test_several_ranks[False',
    'checkpoint/test_exact_resume.py::test_an_eager_card[lazy',
    'checkpoint/test_exact_resume.py::test_an_eager_card[zeta-1',
    'checkpoint/test_exact_resume.py::test_an_eager_card[npu',
    'checkpoint/test_exact_resume.py::test_a_finished_run_is_not_validated_again[False',
    'checkpoint/test_exact_resume.py::test_a_seed_that_nobody_chose',
    'checkpoint/test_exact_resume.py::test_between_epochs_with_validation_pending[False',
    'checkpoint/test_resuming.py::test_everything_else_with_a_state[workers',
    'checkpoint/test_resuming.py::test_schedules_and_optimizers[Constant',
    'checkpoint/test_resuming.py::test_schedules_and_optimizers[Step',
    'checkpoint/test_resuming.py::test_schedules_and_optimizers[Poly',
    'checkpoint/test_safe_checkpoint_hook.py::test_no_room_ends_all_ranks',
    # Commands and their processes.
    'cli/test_brief_terminal.py::test_the_terminal_shows_results_and_the_file_everything[words1',
    'cli/test_brief_terminal.py::test_a_warning_of_several_ranks_is_shown_once[words1',
    'cli/test_configs.py::test_a_package_whose_import_fails',
    'cli/test_containers.py::test_doctor_in_a_container_without_rights',
    'cli/test_containers.py::test_saves_in_time[1',
    'cli/test_launch_config.py::test_devices_are_counted_and_missing_ones_refused',
    'cli/test_ranks.py::test_forked_ranks_find_what_started_ones_do',
    'cli/test_ranks.py::test_one_rank_alone_prints_no_warnings',
    'cli/test_ranks.py::test_a_failure_is_told_in_one_line[sys.exit',
    'cli/test_ranks.py::test_a_failure_is_told_in_one_line[os.kill',
    'cli/test_signals.py::test_a_signal_to_a_rank_or_to_everybody_saves',
    'cli/test_signals.py::test_nothing_is_left_where_one_is_killed[command',
    'cli/test_signals.py::test_nothing_is_left_where_one_is_killed[server',
    'cli/test_slurm.py::test_a_job_trains_in_all_tasks',
    'cli/test_tools.py',
    'checks/test_report.py::test_errors_make_the_exit_status',
    'model_parallel/test_choose_devices.py::test_a_live_launcher_is_followed[accelerate',
    'model_parallel/test_model_parallel.py::test_two_ranks_of_two_devices_each_are_one_device_with'
    '_all_the_data[segmentor',
    'model_parallel/test_model_parallel.py::test_features_across_devices[clipping',
    'runner/test_native.py::test_the_command_trains_two_ranks',
    'runner/test_native.py::test_digits[tpu',
    'runner/test_freed_memory.py',
    # Inductor writes C++ of the graphs that `aot_eager` makes, for 20 seconds of a core.
    'runner/test_compile.py::test_two_compiled_ranks_equal_one_process[inductor',
    'runner/test_compile.py::test_mixed_precision_is_compiled',
    'runner/test_loops.py::test_a_stream_trains_by_iterations_and_resumes[64',
    'patches/test_patches.py::test_a_job_changes_what_the_list_says_and_all_of_it_is_restored[cpu',
    'patches/test_patches.py::test_a_job_changes_what_the_list_says_and_all_of_it_is_restored[zeta-0',
    'patches/mmcv_ops/test_operators.py::test_faster_rcnn_trains_on_the_cpu_in_bfloat16',
    'test_add_an_accelerator.py::test_conformance_knows_an_installed_package',
    'test_add_an_accelerator.py::test_more_ranks_than_cards',
    'test_install.py::test_nothing_is_installed_over_onedl[[',
    # Eight more models and cards, and more kills, on PyTorch 1.10.
    't20/test_mmseg.py::test_losses',
    't20/test_mmseg.py::test_weights',
    't20/test_mmseg.py::test_metrics',
    't20/test_mmseg.py::test_checkpoints',
    't20/test_training.py::test_kills_change_no_bit',
    # On torch_xla, whose graphs take long to compile: more detectors.
    'xla/test_host_losses.py::test_detectors_train_as_on_the_host',
    'xla/test_host_losses.py::test_detectors_predict_as_on_the_host',
    'xla/test_checkpoints.py::test_interrupted_and_resumed',
    'test_soak.py',
    'conformance/test_operations.py::test_operations[cpu',
    # Ranks that are late, lost or wrong.
    'distributed/test_waiting.py::test_a_rank_that_dies_while_others_wait[0',
    'distributed/test_waiting.py::test_a_timeout_names_the_missing_rank_on_all',
    'fault_tolerance/test_failure.py::test_a_rank_that_leaves_by_itself_was_not_killed',
    'fault_tolerance/test_failure.py::test_process_group_on_the_loopback_interface',
    'fault_tolerance/test_heartbeat.py::test_a_rank_that_holds_the_interpreter',
    'fault_tolerance/test_scale.py::test_few_operations_on_the_store',
    'fault_tolerance/test_places.py::test_gathering_samples_says_for_whom_it_waits',
    'fault_tolerance/test_places.py::test_a_rank_that_comes_before_the_store_says_so',
    'samples/test_faults.py::test_a_rank_that_is_killed_is_named',
    'samples/test_faults.py::test_the_rank_is_named[hang-4-balance',
    'staged/test_collectives.py::test_a_destroyed_group_keeps_no_connections',
    'staged/test_shared_sum.py::test_averages_arrive_in_whatever_order_they_are_waited_for[cpu',
    'staged/test_training.py::test_no_thread_of_gloo_outlives_the_program[destroy',
    'staged/test_training.py::test_no_thread_of_gloo_outlives_the_program[leave',
    'staged/test_training.py::test_no_thread_of_gloo_outlives_the_program[accelerate',
    'staged/test_training.py::test_the_script_for_accelerate',
)

#: Kinds of devices, and another whose way through the code is the same.
SAME_PATH = {'cpu': 'zeta', 'mlu': 'npu', 'gcu': 'xla'}
#: Files that train much on each kind of device, once for all their cases: `make test` does on the
#: card without a backend, the gate on each that takes a path of its own.
ON_ONE_CARD = ('features/test_features.py',)
#: Markers of tests for another environment.
ELSEWHERE = ('cuda', 'xla', 't20', 'tpu', 'opencl')


def mark_long(items):
    """Mark what takes long. A beginning in :data:`LONG` that is no test's is an error."""
    used, cases = set(), {_case(item) for item in items}
    for item in items:
        name = _name(item)
        found = [start for start in LONG if name.startswith(start)]
        used.update(found)
        *place, device = _case(item)
        twin = (*place, SAME_PATH.get(device, '')) in cases
        alone = name.startswith(ON_ONE_CARD) and device not in (None, 'zeta')
        if found or twin or alone:
            item.add_marker(pytest.mark.long)
    files = {_name(item).split('::')[0] for item in items}
    unused = [each for each in set(LONG) - used if each.split('::')[0] in files]
    return sorted(unused)


def leave_to_long(items):
    """What the gate leaves to `make test-long` of tests that take long.

    Of each test it runs the first case on each kind of device that takes a path of its own, unless
    a case of that kind does not take long and runs anyway.
    """
    seen = {_kind(item) for item in items if not item.get_closest_marker('long')}
    left = []
    for item in items:
        kind = _kind(item)
        device = _case(item)[-1]
        if not item.get_closest_marker('long') or _is_skipped(item):
            continue
        if _name(item).startswith(ON_ONE_CARD):
            if device in SAME_PATH:
                left.append(item)
        elif kind in seen:
            left.append(item)
        seen.add(kind)
    return left


def _name(item):
    return item.nodeid.split('tests/', 1)[-1]


def _elsewhere(item):
    return tuple(name for name in ELSEWHERE if item.get_closest_marker(name))


def _is_skipped(item):
    return any(mark.args and mark.args[0] for mark in item.iter_markers('skipif'))


def _kind(item):
    """A test, its environment, and a device whose path through the code is that of its own."""
    device = _case(item)[-1]
    return item.nodeid.split('[')[0], _elsewhere(item), SAME_PATH.get(device, device)


def _case(item):
    """A test with its parameters but the kind of device, and that kind."""
    params = dict(getattr(getattr(item, 'callspec', None), 'params', {}))
    device = params.pop('accelerator', None)
    return item.nodeid.split('[')[0], repr(sorted(params.items(), key=str)), device


#: What a module says where it does something else on an older release of PyTorch.
_OLDER = re.compile(
    r'torch_compat|is_at_least|(?:has|get)attr\((?:getattr\()?torch|'
    r'PyTorch (?:1\b|before)|since PyTorch|not in PyTorch|torch_gcu 1'
)


def has_a_branch(path):
    """Whether tests of a file are repeated on PyTorch 1.10.

    They are if the file, or a helper that it imports, imports a module of the package that does
    something else on an older release. Helpers lie beside it, or in the folder of docs/ whose page
    is made of what it finds.
    """
    path, todo, seen = Path(path), [Path(path)], set()
    places = {path.parent, ROOT / 'docs' / path.parent.name} - {ROOT / 'tests'}
    while todo:
        each = todo.pop()
        seen.add(each)
        for module in map(_file_of, _imports(each)):
            if PACKAGE in module.parents and _OLDER.search(module.read_text()):
                return True
            if module.parent in places and module not in seen:
                todo.append(module)
    return False


def _file_of(name):
    path = ROOT / name.replace('.', '/')
    return path / '__init__.py' if path.is_dir() else path.with_suffix('.py')


def _imports(path):
    """Names of modules of this repository that a file imports, each where it is defined."""
    place = path.relative_to(ROOT).with_suffix('').parts
    root = (PACKAGE / '__init__.py').read_text()
    for node in ast.walk(ast.parse(path.read_text())):
        found = []
        if isinstance(node, ast.Import):
            found = [(one.name, '') for one in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = '.'.join(place[: -node.level]) if node.level else ''
            module = '.'.join(filter(None, [above, node.module]))
            found = [(module, one.name) for one in node.names]
        for module, name in found:
            # The root imports each of its names when it is asked for.
            named = module == 'mmdevplug' and re.search(rf"'{name}': '([\w.]+)'", root)
            if named:
                module = named.group(1)
            elif _file_of(f'{module}.{name}').exists():
                module = f'{module}.{name}'
            elif _file_of(module).name == '__init__.py' and _file_of(module) != path:
                yield from (each for each, names in _exports(module) if name in names)
            if _file_of(module).exists():
                yield module


def _exports(package):
    """Modules that a package's ``__init__`` imports from, each with the names."""
    for node in ast.parse(_file_of(package).read_text()).body:
        if isinstance(node, ast.ImportFrom) and (
            node.level or node.module.startswith('mmdevplug')
        ):
            module = f'{package}.{node.module}' if node.level else node.module
            yield module, [one.name for one in node.names]
