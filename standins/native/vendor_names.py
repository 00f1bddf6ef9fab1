"""What vendors' own sources list as public, and what the stand-ins leave out of it."""

from pathlib import Path

_LINES = Path(__file__).with_name('npu_names.txt').read_text().splitlines()
#: What torch_npu offers as ``torch.npu``: names, with parameters where its Python files have them.
NPU_LINES = [line for line in _LINES if not line.startswith('#')]
NPU = ' '.join(line.split('(')[0] for line in NPU_LINES)

#: ``__all__`` of the module of openreg, PyTorch's reference for devices outside of it, without the
#: name of a file, and what PyTorch itself asks of such a module.
OPENREG = """
current_device device device_count get_amp_supported_dtype get_rng_state get_rng_state_all init
initial_seed is_available is_initialized manual_seed manual_seed_all seed seed_all set_device
set_rng_state set_rng_state_all _is_in_bad_fork
"""

#: The public functions and classes of ``torch_mlu.mlu`` in Cambricon's source.
MLU = """
BFloat16Storage BoolStorage ByteStorage CharStorage ComplexDoubleStorage ComplexFloatStorage
DoubleStorage Event ExternalStream FloatStorage HalfStorage IntStorage LongStorage MLUGraph
ShortStorage Stream StreamContext batch_isend_irecv caching_allocator_alloc
caching_allocator_delete can_device_access_peer cncl_stream current_device current_stream
default_stream device device_count device_of empty_cache get_amp_supported_dtype
get_autocast_dtype get_device_capability get_device_name get_device_properties get_rng_state
get_rng_state_all graph graph_pool_handle init initial_seed ipc_collect is_autocast_enabled
is_available is_bf16_supported is_cncl_available is_current_stream_capturing is_initialized
make_graphed_callables manual_seed manual_seed_all max_memory_allocated max_memory_cached
max_memory_reserved mem_get_info memory_allocated memory_cached memory_reserved memory_snapshot
memory_stats memory_stats_as_nested_dict memory_summary reset_accumulated_memory_stats
reset_max_memory_allocated reset_max_memory_cached reset_peak_memory_stats seed seed_all
set_autocast_dtype set_autocast_enabled set_device set_per_process_memory_fraction
set_rng_state set_rng_state_all set_stream stream supports_linear_memory synchronize version
"""

#: Not in the stand-ins, and so missing for what calls them: graphs, dumps, storages of the old
#: kind, allocators and streams made outside, limits of cores, recovery, obfuscation.
LEFT_OUT = """
BFloat16Storage BoolStorage ByteStorage CharStorage ComplexDoubleStorage ComplexFloatStorage
CubeMathType DoubleStorage ExternalEvent ExternalStream FloatStorage HalfStorage IntStorage
LongStorage MLUGraph MemPool NPUGraph NPUPluggableAllocator NpuGraphOpHandler ShortStorage
SyncLaunchStream are_compatible_impl_enabled batch_isend_irecv caching_allocator_alloc
caching_allocator_delete change_current_allocator check_uce_in_memory clear_npu_overflow_flag
cncl_stream config conv current_blas_handle disable_deterministic_with_backward
empty_virt_addr_cache enable_deterministic_with_backward finalize_dump get_allocator_backend
get_device_limit get_mm_bmm_format_nd get_npu_overflow_flag get_per_process_memory_fraction
get_stream_limit graph graph_pool_handle graph_task_group_begin graph_task_group_end
graph_task_update_begin graph_task_update_end host_empty_cache host_memory_stats
host_memory_stats_as_nested_dict init_dump is_cncl_available make_graphed_callables matmul mstx
npurt obfuscation_calculate obfuscation_finalize obfuscation_initialize
register_npu_graph_handler reset_accumulated_host_memory_stats reset_peak_host_memory_stats
reset_stream_limit restart_device set_aoe set_deterministic_level set_device_limit set_dump
set_mm_bmm_format_nd set_op_timeout_ms set_stream_limit stop_device stress_detect
super_kernel_scope_begin super_kernel_scope_end supports_linear_memory use_compatible_impl
use_mem_pool version get_task_queue_enable set_task_queue_enable
"""
