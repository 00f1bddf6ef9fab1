// A lazy card for PyTorch 1.10 under DispatchKey::XLA: host memory, PyTorch's CPU kernels, and an account of what
// a lazy card would have executed. Every kernel computes at once; the account decides when a result counts as there.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Utils.h>
#include <ATen/native/Resize.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_set>

namespace py = pybind11;
using at::Tensor;
using c10::IValue;
using OptionalTensor = c10::optional<Tensor>;

namespace {

constexpr auto kCard = c10::DeviceType::XLA;
constexpr int kMost = 16;

// ---- the account ----

struct Block {
  void* address;
  size_t bytes;
  int device;
  bool pending;  // Written since the last execution whose outputs held it.
};

struct Account {
  std::set<Block*> blocks;
  size_t allocated = 0, peak = 0;
  long operations = 0;        // Since the last execution.
  long all_operations = 0;
  size_t graph = 0;           // Hash of these operations.
  std::map<std::string, long> executions;
  std::unordered_set<size_t> graphs;
  long compilations = 0;
};

std::recursive_mutex g_mutex;
Account g_accounts[kMost];
int g_count = 8;
bool g_narrow = false;
bool g_lose_weights = false;
std::vector<at::Generator> g_generators;
thread_local int g_current = 0;
thread_local int g_inside = 0;  // Copies that a kernel makes for itself are no reads by the host.

struct Inside {
  Inside() { ++g_inside; }
  ~Inside() { --g_inside; }
};

void release(void* context) {
  std::lock_guard<std::recursive_mutex> lock(g_mutex);
  auto* block = static_cast<Block*>(context);
  auto& account = g_accounts[block->device];
  account.blocks.erase(block);
  account.allocated -= block->bytes;
  std::free(block->address);
  delete block;
}

Block* block_of(const Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != kCard || !tensor.has_storage()) return nullptr;
  const auto& data = tensor.storage().data_ptr();
  return data.get_deleter() == &release ? static_cast<Block*>(data.get_context()) : nullptr;
}

size_t mix(size_t seed, size_t value) { return seed ^ (value + 0x9e3779b97f4a7c15ull + (seed << 6) + (seed >> 2)); }

size_t shape_hash(const Tensor& tensor) {
  size_t hash = static_cast<size_t>(tensor.scalar_type());
  for (auto size : tensor.sizes()) hash = mix(hash, static_cast<size_t>(size));
  return hash;
}

void note(int device, const std::string& name, size_t shapes) {
  std::lock_guard<std::recursive_mutex> lock(g_mutex);
  auto& account = g_accounts[device];
  ++account.operations;
  ++account.all_operations;
  account.graph = mix(mix(account.graph, std::hash<std::string>{}(name)), shapes);
}

Tensor as_host(const Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cpu()) return tensor;
  auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

// TopsRider can compute int64 as int32 and float64 as float32.
void narrow(const Tensor& tensor) {
  if (!g_narrow || tensor.numel() == 0) return;
  auto host = as_host(tensor);
  if (host.scalar_type() == at::kLong) host.copy_(host.to(at::kInt));
  if (host.scalar_type() == at::kDouble) host.copy_(host.to(at::kFloat));
}

void written(const Tensor& tensor) {
  std::lock_guard<std::recursive_mutex> lock(g_mutex);
  if (auto* block = block_of(tensor)) {
    block->pending = true;
    narrow(tensor);
  }
}

// One run of a graph whose outputs are these blocks. Without pending ones there is nothing to run.
bool execute(int device, const std::string& reason, const std::vector<Block*>& outputs) {
  std::lock_guard<std::recursive_mutex> lock(g_mutex);
  auto& account = g_accounts[device];
  size_t graph = account.graph;
  bool any = false;
  for (auto* block : outputs) {
    if (!block->pending) continue;
    any = true;
    block->pending = false;
    graph = mix(graph, block->bytes);
  }
  if (!any) return false;
  ++account.executions[reason];
  if (account.graphs.insert(graph).second) ++account.compilations;
  account.operations = 0;
  account.graph = 0;
  return true;
}

bool execute_all(int device, const std::string& reason) {
  std::lock_guard<std::recursive_mutex> lock(g_mutex);
  auto& blocks = g_accounts[device].blocks;
  // In the order of their sizes: addresses differ from one iteration to the next.
  std::vector<Block*> outputs(blocks.begin(), blocks.end());
  std::sort(outputs.begin(), outputs.end(), [](Block* a, Block* b) { return a->bytes < b->bytes; });
  return execute(device, reason, outputs);
}

bool execute_some(const std::vector<Tensor>& tensors, const std::string& reason) {
  std::map<int, std::vector<Block*>> outputs;
  for (const auto& tensor : tensors)
    if (auto* block = block_of(tensor)) outputs[block->device].push_back(block);
  bool any = false;
  for (auto& item : outputs) any = execute(item.first, reason, item.second) || any;
  return any;
}

void read_by_host(const Tensor& tensor, const char* how) {
  if (g_inside == 0) execute_some({tensor}, how);
}

// ---- device and memory ----

struct CardAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) const override {
    void* address = nullptr;
    if (bytes && posix_memalign(&address, 64, bytes)) throw std::bad_alloc();
    auto* block = new Block{address, bytes, g_current, false};
    std::lock_guard<std::recursive_mutex> lock(g_mutex);
    auto& account = g_accounts[g_current];
    account.blocks.insert(block);
    account.allocated += bytes;
    account.peak = std::max(account.peak, account.allocated);
    return {address, block, &release, c10::Device(kCard, static_cast<c10::DeviceIndex>(g_current))};
  }
};
CardAllocator g_allocator;

void check_index(int index) {
  TORCH_CHECK_INDEX(index >= 0 && index < g_count, "xla:", index, " does not exist: this process sees ", g_count,
                    " card(s), xla:0 ... xla:", g_count - 1);
}

struct CardGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kCard; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return c10::Device(kCard, static_cast<c10::DeviceIndex>(g_current)); }
  void setDevice(c10::Device device) const override {
    if (!device.has_index()) return;
    check_index(device.index());
    g_current = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) g_current = device.index();
  }
  c10::Stream getStream(c10::Device device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(g_count); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

c10::Device with_index(c10::optional<c10::Device> device) {
  auto found = device.value_or(c10::Device(kCard, static_cast<c10::DeviceIndex>(g_current)));
  if (!found.has_index()) found = c10::Device(kCard, static_cast<c10::DeviceIndex>(g_current));
  return found;
}

Tensor empty(at::IntArrayRef sizes, c10::optional<at::ScalarType> dtype, c10::optional<at::Layout>,
             c10::optional<at::Device> device, c10::optional<bool>, c10::optional<at::MemoryFormat> format) {
  auto where = with_index(device);
  c10::DeviceGuard guard(where);
  return at::detail::empty_generic(sizes, &g_allocator, c10::DispatchKey::XLA, c10::dtype_or_default(dtype), where,
                                   format);
}

Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, c10::optional<at::ScalarType> dtype,
                     c10::optional<at::Layout> layout, c10::optional<at::Device> device, c10::optional<bool> pin) {
  auto where = with_index(device);
  c10::DeviceGuard guard(where);
  auto result = empty({0}, dtype, layout, where, pin, c10::nullopt);
  at::native::resize_impl_cpu_(result.unsafeGetTensorImpl(), sizes, strides);
  return result;
}

// Resizing allocates on the current device, which need not be the tensor's.
void resize_to(const Tensor& tensor, at::IntArrayRef sizes) {
  c10::DeviceGuard guard(tensor.device());
  at::native::resize_impl_cpu_(tensor.unsafeGetTensorImpl(), sizes, c10::nullopt);
}

const Tensor& resize(const Tensor& tensor, at::IntArrayRef sizes, c10::optional<at::MemoryFormat>) {
  resize_to(tensor, sizes);
  return tensor;
}

Tensor upload(const Tensor& host, c10::Device device) {
  if (!host.defined() || !host.is_cpu()) return host;
  auto result = empty_strided(host.sizes(), host.strides(), host.scalar_type(), c10::nullopt, device, c10::nullopt);
  as_host(result).copy_(host);
  return result;
}

// ---- copies and reads ----

Tensor copy_from(const Tensor& source, const Tensor& target, bool) {
  if (target.is_cpu()) read_by_host(source, "copy to host");
  auto* block = block_of(target);
  // The vendor's fault: what the host writes into a tensor that waits for an execution is lost.
  if (g_lose_weights && g_inside == 0 && source.is_cpu() && block && block->pending) return target;
  as_host(target).copy_(as_host(source));
  if (!block) return target;
  if (source.is_cpu() && target.nbytes() == target.storage().nbytes()) {
    narrow(target);  // Data from the host are there at once.
    std::lock_guard<std::recursive_mutex> lock(g_mutex);
    block->pending = g_lose_weights;
    return target;
  }
  note(block->device, "aten::_copy_from", shape_hash(target));
  written(target);
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  if (target.is_cpu()) {
    target.resize_(source.sizes());
  } else {
    resize_to(target, source.sizes());
  }
  copy_from(source, target, false);
  return target;
}

at::Scalar item(const Tensor& tensor) {
  read_by_host(tensor, "item");
  return as_host(tensor).item();
}

// ---- views ----

Tensor view_of(const Tensor& base, caffe2::TypeMeta dtype, at::IntArrayRef sizes, at::IntArrayRef strides,
               int64_t offset) {
  auto result = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()),
                                                         base.key_set(), dtype);
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(sizes, strides);
  return result;
}

Tensor as_strided(const Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides,
                  c10::optional<int64_t> offset) {
  return view_of(tensor, tensor.dtype(), sizes, strides, offset.value_or(tensor.storage_offset()));
}

Tensor reshape_alias(const Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides) {
  return view_of(tensor, tensor.dtype(), sizes, strides, tensor.storage_offset());
}

Tensor view(const Tensor& tensor, at::IntArrayRef sizes) {
  auto host = as_host(tensor).view(sizes);
  return view_of(tensor, tensor.dtype(), host.sizes(), host.strides(), tensor.storage_offset());
}

// ---- every other operation ----

bool is_low(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }

// Operations whose result's shape depends on data: a lazy card runs what is pending to learn it.
bool needs_values(const std::string& name) {
  static const std::set<std::string> names{"aten::nonzero",  "aten::masked_select",      "aten::_unique",
                                           "aten::_unique2", "aten::unique_consecutive", "aten::equal",
                                           "aten::unique_dim"};
  return names.count(name) > 0;
}

// Numbers without dimensions may come from the host.
void check_device(const Tensor& one, const Tensor& other) {
  if (one.device() == other.device()) return;
  if ((one.is_cpu() && one.dim() == 0) || (other.is_cpu() && other.dim() == 0)) return;
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", one.device(),
              " and ", other.device(), "!");
}

struct Call {
  c10::optional<c10::Device> device;
  c10::ScalarType low = c10::ScalarType::Undefined;  // A 16-bit type among the arguments.
  bool wide = false;                                 // A wider floating-point tensor with dimensions is, too.
  size_t shapes = 0;
  Tensor first;
  std::vector<Tensor> inputs;

  void see(const Tensor& tensor, bool anywhere = false) {
    if (!tensor.defined()) return;
    if (!anywhere && !first.defined()) first = tensor;
    if (!anywhere) check_device(first, tensor);
    if (!device && tensor.device().type() == kCard) device = tensor.device();
    if (is_low(tensor.scalar_type())) low = tensor.scalar_type();
    if (at::isFloatingType(tensor.scalar_type()) && !is_low(tensor.scalar_type()) && tensor.dim() > 0) wide = true;
    shapes = mix(shapes, shape_hash(tensor));
    inputs.push_back(tensor);
  }
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Inside inside;
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  const size_t begin = stack->size() - arguments.size();
  std::vector<IValue> given(stack->begin() + begin, stack->end());

  Call call;
  bool typed = false, indexed_by_mask = false;
  for (size_t i = 0; i < given.size(); ++i) {
    const auto& value = given[i];
    if (value.isTensor()) {
      call.see(value.toTensor());
    } else if (value.isTensorList()) {
      for (const Tensor& tensor : value.toTensorVector()) call.see(tensor);
    } else if (value.isList() && arguments[i].type()->str() == "Tensor?[]") {
      for (const IValue& element : value.toListRef()) {
        if (!element.isTensor()) continue;
        call.see(element.toTensor(), /*anywhere=*/element.toTensor().is_cpu());
        auto type = element.toTensor().scalar_type();
        indexed_by_mask = indexed_by_mask || type == at::kBool || type == at::kByte;
      }
    } else if (value.isDevice() && value.toDevice().type() == kCard && !call.device) {
      call.device = with_index(value.toDevice());
    }
    // Booleans are given as such, a dtype as an integer under a name that says so.
    if (arguments[i].name() == "dtype" && !value.isNone()) typed = true;
  }
  const auto device = with_index(call.device);
  c10::DeviceGuard guard(device);

  const auto& returns = schema.returns();
  const bool gives_view = !returns.empty() && returns[0].alias_info() && !returns[0].alias_info()->isWrite();
  const bool widen = call.low != c10::ScalarType::Undefined && !gives_view;
  if (needs_values(schema.name()) || (indexed_by_mask && schema.name() == "aten::index")) {
    execute_some(call.inputs, "data-dependent " + schema.name());
  }

  // PyTorch 1.10 lacks many CPU kernels for 16-bit numbers: compute in float32 and round.
  auto to_host = [&](const Tensor& tensor, bool writes) -> Tensor {
    if (!tensor.defined()) return tensor;
    auto host = as_host(tensor);
    if (widen && is_low(tensor.scalar_type())) return host.to(at::kFloat);
    return writes ? host.clone(at::MemoryFormat::Preserve) : host;
  };
  auto is_written = [&](size_t i) { return arguments[i].alias_info() && arguments[i].alias_info()->isWrite(); };

  for (size_t i = 0; i < given.size(); ++i) {
    auto& value = (*stack)[begin + i];
    if (value.isTensor()) {
      value = to_host(value.toTensor(), is_written(i));
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : given[i].toTensorVector()) list.push_back(to_host(tensor, is_written(i)));
      value = std::move(list);
    } else if (value.isList() && arguments[i].type()->str() == "Tensor?[]") {
      c10::List<OptionalTensor> list;
      for (const IValue& element : given[i].toListRef()) {
        list.push_back(element.isTensor() ? OptionalTensor(to_host(element.toTensor(), false)) : c10::nullopt);
      }
      value = std::move(list);
    } else if (value.isDevice()) {
      value = c10::Device(at::kCPU);
    } else if (value.isNone() && arguments[i].type()->str() == "Generator?") {
      value = g_generators[device.index()];
    }
  }
  std::vector<IValue> host_given(stack->begin() + begin, stack->end());

  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  note(device.index(), schema.name(), call.shapes);

  auto put_back = [&](const Tensor& original, const Tensor& host) {
    if (!original.defined()) return;
    if (original.is_cpu()) {
      if (!original.is_same(host)) original.resize_(host.sizes()).copy_(host);
      return;
    }
    if (original.sizes() != host.sizes()) resize_to(original, host.sizes());
    as_host(original).copy_(host);
    written(original);
  };
  for (size_t i = 0; i < given.size(); ++i) {
    if (!is_written(i)) continue;
    if (given[i].isTensor()) put_back(given[i].toTensor(), host_given[i].toTensor());
    if (given[i].isTensorList()) {
      auto originals = given[i].toTensorVector(), hosts = host_given[i].toTensorVector();
      for (size_t k = 0; k < originals.size(); ++k) put_back(originals[k], hosts[k]);
    }
  }

  auto to_card = [&](const Tensor& host) -> Tensor {
    if (!host.defined() || !host.is_cpu()) return host;
    for (size_t i = 0; i < given.size(); ++i) {
      if (is_written(i) && given[i].isTensor() && host.is_same(host_given[i].toTensor())) return given[i].toTensor();
    }
    if (gives_view) {
      const auto& base = given[0].toTensor();
      auto distance = static_cast<char*>(host.data_ptr()) - static_cast<char*>(base.storage().data());
      return view_of(base, host.dtype(), host.sizes(), host.strides(), distance / host.element_size());
    }
    bool round = widen && !call.wide && !typed && host.scalar_type() == at::kFloat;
    auto result = upload(round ? host.to(call.low) : host, device);
    written(result);
    return result;
  };
  for (size_t i = stack->size() - returns.size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = to_card(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(to_card(tensor));
      value = std::move(list);
    }
  }
}

// ---- operations that the CPU has under another name, or not at all ----

OptionalTensor host_of(const OptionalTensor& tensor) {
  return tensor && tensor->defined() ? OptionalTensor(as_host(*tensor)) : c10::nullopt;
}

Tensor computable(const Tensor& tensor) {
  auto host = as_host(tensor);
  return is_low(host.scalar_type()) ? host.to(at::kFloat) : host;
}

Tensor result_on(const Tensor& host, const Tensor& like) {
  if (!host.defined()) return host;
  auto result = upload(host.to(like.scalar_type()), like.device());
  written(result);
  return result;
}

Tensor convolution(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, at::IntArrayRef stride,
                   at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef out_padding,
                   int64_t groups) {
  Inside inside;
  check_device(input, weight);
  OptionalTensor host_bias = bias && bias->defined() ? OptionalTensor(computable(*bias)) : c10::nullopt;
  auto result = at::convolution(computable(input), computable(weight), host_bias, stride, padding, dilation,
                                transposed, out_padding, groups);
  note(input.device().index(), "aten::convolution", mix(shape_hash(input), shape_hash(weight)));
  return result_on(result, input);
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& gradient, const Tensor& input,
                                                        const Tensor& weight, at::IntArrayRef stride,
                                                        at::IntArrayRef padding, at::IntArrayRef dilation,
                                                        bool transposed, at::IntArrayRef out_padding, int64_t groups,
                                                        std::array<bool, 3> mask) {
  Inside inside;
  Tensor of_input, of_weight, of_bias;
  auto host_gradient = computable(gradient).contiguous();
  {
    // Inside a kernel the autograd keys are excluded, and this needs a graph of its own on the host.
    auto saved = c10::impl::tls_local_dispatch_key_set();
    c10::impl::_force_tls_local_dispatch_key_set(c10::impl::LocalDispatchKeySet(c10::impl::PODLocalDispatchKeySet()));
    at::AutoGradMode enabled(true);
    auto x = computable(input).detach().requires_grad_(true);
    auto w = computable(weight).detach().requires_grad_(true);
    auto y = at::convolution(x, w, c10::nullopt, stride, padding, dilation, transposed, out_padding, groups);
    auto found = torch::autograd::grad({y}, {x, w}, {host_gradient});
    of_input = found[0].detach();
    of_weight = found[1].detach();
    c10::impl::_force_tls_local_dispatch_key_set(saved);
  }
  if (mask[2]) {
    std::vector<int64_t> dims;
    for (int64_t i = 0; i < gradient.dim(); ++i)
      if (i != 1) dims.push_back(i);
    of_bias = host_gradient.sum(dims);
  }
  note(input.device().index(), "aten::convolution_backward", mix(shape_hash(input), shape_hash(weight)));
  return std::make_tuple(mask[0] ? result_on(of_input, input) : Tensor(),
                         mask[1] ? result_on(of_weight, weight) : Tensor(), result_on(of_bias, weight));
}

// The running statistics are written though the schema does not say so.
std::tuple<Tensor, Tensor, Tensor> batch_norm(const Tensor& input, const OptionalTensor& weight,
                                              const OptionalTensor& bias, const OptionalTensor& mean,
                                              const OptionalTensor& variance, bool training, double momentum,
                                              double eps) {
  Inside inside;
  auto found = at::native_batch_norm(computable(input), host_of(weight), host_of(bias), host_of(mean),
                                     host_of(variance), training, momentum, eps);
  note(input.device().index(), "aten::native_batch_norm", shape_hash(input));
  if (training && mean && mean->defined()) written(*mean);
  if (training && variance && variance->defined()) written(*variance);
  auto statistics = [&](const Tensor& host) {
    auto result = upload(host, input.device());
    written(result);
    return result;
  };
  return std::make_tuple(result_on(std::get<0>(found), input), statistics(std::get<1>(found)),
                         statistics(std::get<2>(found)));
}

std::tuple<Tensor, Tensor, Tensor> batch_norm_backward(const Tensor& gradient, const Tensor& input,
                                                       const OptionalTensor& weight, const OptionalTensor& mean,
                                                       const OptionalTensor& variance,
                                                       const OptionalTensor& save_mean,
                                                       const OptionalTensor& save_invstd, bool training, double eps,
                                                       std::array<bool, 3> mask) {
  Inside inside;
  auto found = at::native_batch_norm_backward(computable(gradient), computable(input), host_of(weight),
                                              host_of(mean), host_of(variance), host_of(save_mean),
                                              host_of(save_invstd), training, eps, mask);
  note(input.device().index(), "aten::native_batch_norm_backward", shape_hash(input));
  const Tensor& like = weight && weight->defined() ? *weight : input;
  return std::make_tuple(result_on(std::get<0>(found), input), result_on(std::get<1>(found), like),
                         result_on(std::get<2>(found), like));
}

void check_and_unscale(at::TensorList gradients, Tensor& found_inf, const Tensor& inv_scale) {
  Inside inside;
  const auto scale = as_host(inv_scale).item<float>();
  for (const auto& gradient : gradients) {
    auto host = as_host(gradient);
    auto values = computable(gradient);
    if (!values.isfinite().all().item<bool>()) as_host(found_inf).fill_(1.0);
    host.copy_(values.mul(scale));
    note(gradient.device().index(), "aten::_amp_foreach_non_finite_check_and_unscale_", shape_hash(gradient));
    written(gradient);
  }
  written(found_inf);
}

Tensor& update_scale(Tensor& scale, Tensor& growth_tracker, const Tensor& found_inf, double growth_factor,
                     double backoff_factor, int64_t growth_interval) {
  Inside inside;
  auto value = as_host(scale);
  auto tracker = as_host(growth_tracker);
  if (as_host(found_inf).item<float>() != 0) {
    value.mul_(backoff_factor);
    tracker.zero_();
  } else {
    tracker.add_(1);
    if (tracker.item<int>() == growth_interval) {
      value.mul_(growth_factor);
      tracker.zero_();
    }
  }
  note(scale.device().index(), "aten::_amp_update_scale_", shape_hash(scale));
  written(scale);
  written(growth_tracker);
  return scale;
}

// ---- for Python ----

void seed_all(uint64_t seed) {
  for (auto& generator : g_generators) {
    std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_current_seed(seed);
  }
}

void set_count(int count) {
  TORCH_CHECK(count >= 0 && count <= kMost, "a process sees 0 to ", kMost, " cards, not ", count);
  g_count = count;
}

Account& account_of(int device) {
  check_index(device);
  return g_accounts[device];
}

py::dict stats(int device) {
  std::lock_guard<std::recursive_mutex> lock(g_mutex);
  auto& account = account_of(device);
  long pending = 0;
  for (auto* block : account.blocks) pending += block->pending;
  py::dict result;
  result["operations"] = account.operations;
  result["all_operations"] = account.all_operations;
  result["pending"] = pending;
  result["executions"] = account.executions;
  result["compilations"] = account.compilations;
  result["graphs"] = account.graphs.size();
  result["blocks"] = account.blocks.size();
  result["allocated"] = account.allocated;
  result["peak"] = account.peak;
  return result;
}

void reset_stats() {
  std::lock_guard<std::recursive_mutex> lock(g_mutex);
  for (auto& account : g_accounts) {
    account.executions.clear();
    account.compilations = account.all_operations = 0;
    account.peak = account.allocated;
  }
}

}  // namespace

C10_REGISTER_GUARD_IMPL(XLA, CardGuard);

TORCH_LIBRARY_IMPL(_, XLA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, XLA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("as_strided", as_strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("view", view);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("native_batch_norm", batch_norm);
  m.impl("native_batch_norm_backward", batch_norm_backward);
  // Composite otherwise, by views that this card's strides do not allow.
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("native_group_norm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("_amp_foreach_non_finite_check_and_unscale_", check_and_unscale);
  m.impl("_amp_update_scale_", update_scale);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  for (int i = 0; i < kMost; ++i) g_generators.push_back(at::detail::createCPUGenerator());
  m.def("set_count", set_count);
  m.def("device_count", [] { return g_count; });
  m.def("current_device", [] { return g_current; });
  m.def("set_device", [](int index) {
    check_index(index);
    g_current = index;
  });
  m.def("set_lose_weights", [](bool enabled) { g_lose_weights = enabled; });
  m.def("set_narrow", [](bool enabled) { g_narrow = enabled; });
  m.def("seed_all", seed_all);
  m.def("execute_all", [](int device, const std::string& reason) { return execute_all(device, reason); });
  m.def("execute_some", execute_some);
  m.def("is_pending", [](const Tensor& tensor) {
    auto* block = block_of(tensor);
    return block && block->pending;
  });
  m.def("clear_graphs", [] {
    std::lock_guard<std::recursive_mutex> lock(g_mutex);
    for (auto& account : g_accounts) account.graphs.clear();
  });
  m.def("allocated", [](int device) { return account_of(device).allocated; });
  m.def("stats", stats);
  m.def("reset_stats", reset_stats);
}
