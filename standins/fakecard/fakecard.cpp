// A pretend accelerator: PrivateUse1, up to 16 device indices, host memory, CPU kernels through
// the fallback.
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/profiler/stubs/base.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <torch/version.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
static constexpr auto kCard = c10::DeviceType::PrivateUse1;
static int g_count = 4;
static thread_local int g_current = 0;
static size_t g_bytes[16] = {0};
static std::set<std::string> g_left_out;  // operators without a kernel, as "aten::silu"
static bool g_falls_back = false;  // to the CPU, with operands of any devices
static size_t g_limit = 0;  // bytes that each device has; 0: as many as the host
struct Block {
  void* p;
  size_t n;
  int d;
};
// Keeps freed blocks for requests of their size, as the allocators of real devices do. Without it
// malloc, which serves the host as well, scatters them and asks the kernel for more for long.
struct Cache {
  void* take(size_t n) {
    std::lock_guard<std::mutex> hold(lock);
    auto found = blocks.find(n);
    if (found == blocks.end()) return nullptr;
    void* p = found->second;
    blocks.erase(found);
    kept -= n;
    return p;
  }
  void keep(void* p, size_t n) {
    std::lock_guard<std::mutex> hold(lock);
    if (n < kSmallest || kept + n > kMost) return std::free(p);
    blocks.emplace(n, p);
    kept += n;
  }
  void clear() {
    std::lock_guard<std::mutex> hold(lock);
    for (auto& block : blocks) std::free(block.second);
    blocks.clear();
    kept = 0;
  }
  static constexpr size_t kSmallest = 4096, kMost = size_t(256) << 20;
  std::mutex lock;
  std::multimap<size_t, void*> blocks;
  size_t kept = 0;
};
static Cache* g_cache = new Cache;  // outlives the tensors that the interpreter leaves behind
static void drop(void* ctx) {
  auto* b = static_cast<Block*>(ctx);
  g_bytes[b->d] -= b->n;
  g_cache->keep(b->p, b->n);
  delete b;
}
struct CardAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    void* p = nullptr;
    TORCH_CHECK_WITH(OutOfMemoryError, g_limit == 0 || g_bytes[g_current] + n <= g_limit,
                     "fakecard out of memory. Tried to allocate ", n >> 20, ".00 MiB. Device ",
                     g_current, " has a total capacity of ", g_limit >> 20, ".00 MiB");
    if (n && !(p = g_cache->take(n)))
      TORCH_CHECK(posix_memalign(&p, 64, n) == 0, "fakecard: out of memory");
    auto* b = new Block{p, n, g_current};
    g_bytes[g_current] += n;
    return {p, b, &drop, c10::Device(kCard, static_cast<c10::DeviceIndex>(g_current))};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* d, const void* s, std::size_t n) const override { std::memcpy(d, s, n); }
};
static CardAllocator g_alloc;
REGISTER_ALLOCATOR(kCard, &g_alloc);
// Host memory that counts as page-locked, which PyTorch's DDP insists on for unused parameters.
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    void* p = nullptr;
    if (n) TORCH_CHECK(posix_memalign(&p, 64, n) == 0, "fakecard: out of host memory");
    std::lock_guard<std::mutex> hold(lock);
    if (p) sizes[static_cast<char*>(p)] = n;
    return {p, p, &drop_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop_pinned; }
  void copy_data(void* d, const void* s, std::size_t n) const override { std::memcpy(d, s, n); }
  bool holds(const void* data) const {
    std::lock_guard<std::mutex> hold(lock);
    auto p = static_cast<char*>(const_cast<void*>(data));
    auto after = sizes.upper_bound(p);
    return after != sizes.begin() && p < std::prev(after)->first + std::prev(after)->second;
  }
  static void drop_pinned(void* p);
  mutable std::mutex lock;
  std::map<char*, size_t> sizes;
};
static PinnedAllocator g_pinned;
void PinnedAllocator::drop_pinned(void* p) {
  std::lock_guard<std::mutex> hold(g_pinned.lock);
  g_pinned.sizes.erase(static_cast<char*>(p));
  std::free(p);
}
struct CardGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kCard; }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto o = getDevice();
    setDevice(d);
    return o;
  }
  c10::Device getDevice() const override {
    return c10::Device(kCard, static_cast<c10::DeviceIndex>(g_current));
  }
  void setDevice(c10::Device d) const override {
    int i = d.has_index() ? d.index() : g_current;
    TORCH_CHECK(i >= 0 && i < g_count, "fakecard: no device ", i, ", there are ", g_count);
    g_current = i;
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.has_index()) g_current = d.index();
  }
  c10::Stream getStream(c10::Device d) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, d);
  }
  c10::Stream getDefaultStream(c10::Device d) const override {
    return c10::Stream(c10::Stream::DEFAULT, d);
  }
  c10::Stream getNewStream(c10::Device d, int) const override {
    return c10::Stream(c10::Stream::DEFAULT, d);
  }
  c10::Stream exchangeStream(c10::Stream s) const noexcept override { return s; }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(g_count);
  }
  void record(void**, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const {}  // overrides from PyTorch 2.5 on
  void synchronizeEvent(void*) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, CardGuard);
struct CardHooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isAvailable() const { return g_count > 0; }  // overrides from PyTorch 2.7 on
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(g_count); }
  void setCurrentDevice(c10::DeviceIndex d) const override {
    CardGuard().setDevice(c10::Device(kCard, d));
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(g_current);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override {
    auto o = g_current;
    g_current = d;
    return static_cast<c10::DeviceIndex>(o);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override {
    auto o = g_current;
    if (d >= 0) g_current = d;
    return static_cast<c10::DeviceIndex>(o);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    c10::DeviceGuard g(storage.device());
    auto data = storage.allocator()->allocate(size);
    std::memcpy(data.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
  // Overrides from PyTorch 2.5 on.
  bool isPinnedPtr(const void* data) const { return g_pinned.holds(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &g_pinned; }
  // Without `override`: PyTorch before 2.5 has the second alone, later releases the first.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const {
    static at::Generator g = at::detail::createCPUGenerator();
    return g;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex i) {
    return std::as_const(*this).getDefaultGenerator(i);
  }
};
static CardHooks g_hooks;
// What pytorch_ocl registers: enough for a backward pass, and nothing that torch.accelerator asks.
struct BareHooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};
static BareHooks g_bare_hooks;
// What PyTorch's profiler asks of a card: events, which here are times of the host.
struct CardProfiler final : torch::profiler::impl::ProfilerStubs {
  using Event = torch::profiler::impl::ProfilerVoidEventStub;
  void record(c10::DeviceIndex* d, Event* event, int64_t* ns) const override {
    if (d) *d = static_cast<c10::DeviceIndex>(g_current);
    auto now = std::chrono::steady_clock::now().time_since_epoch();
    auto t = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
    if (ns) *ns = t;
    *event = std::make_shared<int64_t>(t);
  }
  float elapsed(const Event* a, const Event* b) const override {  // microseconds
    auto ns = [](const Event* e) { return *static_cast<int64_t*>(e->get()); };
    return static_cast<float>(ns(b) - ns(a)) / 1e3f;
  }
  void mark(const char*) const override {}
  void rangePush(const char*) const override {}
  void rangePop() const override {}
  bool enabled() const override { return true; }
  void onEachDevice(std::function<void(int)> op) const override {
    for (int i = 0; i < g_count; ++i) op(i);
  }
  void synchronize() const override {}
};
static CardProfiler g_profiler;
static at::Tensor e_mf(c10::SymIntArrayRef s, std::optional<at::ScalarType> t,
                       std::optional<at::Layout>, std::optional<at::Device> d, std::optional<bool>,
                       std::optional<at::MemoryFormat> m) {
  c10::DeviceGuard g(d.value_or(c10::Device(kCard, g_current)));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(s), &g_alloc,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(t), m);
}
static at::Tensor e_st(c10::SymIntArrayRef s, c10::SymIntArrayRef st,
                       std::optional<at::ScalarType> t, std::optional<at::Layout>,
                       std::optional<at::Device> d, std::optional<bool>) {
  c10::DeviceGuard g(d.value_or(c10::Device(kCard, g_current)));
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(s), C10_AS_INTARRAYREF_SLOW(st), &g_alloc,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(t));
}
static at::Tensor as_cpu(const at::Tensor& t) {  // the same memory seen as a CPU tensor
  if (t.is_cpu()) return t;
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(),
                       at::TensorOptions().dtype(t.scalar_type()).device(at::kCPU));
}
static at::Tensor copy_from(const at::Tensor& s, const at::Tensor& d, bool) {
  as_cpu(d).copy_(as_cpu(s));
  return d;
}
static at::Tensor copy_resize(const at::Tensor& s, const at::Tensor& d) {
  c10::DeviceGuard g(d.device());
  at::native::resize_(d, s.sizes(), std::nullopt);
  as_cpu(d).copy_(as_cpu(s));
  return d;
}
static at::Scalar item(const at::Tensor& t) { return as_cpu(t).item(); }
static at::Tensor strided(const at::Tensor& t, at::IntArrayRef s, at::IntArrayRef st,
                          std::optional<int64_t> o) {
  return at::cpu::as_strided(t, s, st, o);
}
// The fallback would take a view of a copy, whose memory is laid out otherwise.
static at::Tensor reshape_alias(const at::Tensor& t, c10::SymIntArrayRef s, c10::SymIntArrayRef st) {
  return at::cpu::as_strided(t, C10_AS_INTARRAYREF_SLOW(s), C10_AS_INTARRAYREF_SLOW(st),
                             t.storage_offset());
}
static const at::Tensor& resize(const at::Tensor& t, c10::SymIntArrayRef s,
                                std::optional<at::MemoryFormat> m) {
  c10::DeviceGuard g(t.device());  // the memory that it may take is on that device
  return at::native::resize_(t, C10_AS_INTARRAYREF_SLOW(s), m);
}
static at::Tensor& set_st(at::Tensor& t, at::Storage st, int64_t o, at::IntArrayRef s,
                          at::IntArrayRef r) {
  return at::cpu::set_(t, st, o, s, r);
}
static at::Tensor& set_plain(at::Tensor& t, at::Storage st) {
  auto n = static_cast<int64_t>(st.nbytes() / t.itemsize());
  return at::cpu::set_(t, st, 0, {n}, {1});
}
static at::Tensor view(const at::Tensor& t, c10::SymIntArrayRef s) {
  return at::native::view(t, C10_AS_INTARRAYREF_SLOW(s));
}
// A view too: the fallback would return one of a copy that is gone.
static at::Tensor unfold(const at::Tensor& t, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(t, dim, size, step);
}
static at::Tensor to_card(const at::Tensor& c, c10::Device d) { return c.defined() ? c.to(d) : c; }
// As PyTorch says it of an operator without a kernel, its table of kernels included.
static void need_kernel(const std::string& name, const c10::OperatorHandle* op = nullptr) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !g_left_out.count(name), "Could not run '", name, "' with arguments from the '",
      c10::get_privateuse1_backend(), "' backend. This could be because the operator doesn't exist "
      "for this backend, or was omitted during the selective/custom build process (if using custom "
      "build).\n\n", op ? op->dumpComputedTable() : std::string(4000, '.'));
}
// As the kernels of a card do, and PyTorch's own iterator: a number may be on the host.
struct OneDevice {
  std::string name;
  std::optional<c10::Device> first;
  void check(const at::Tensor& t) {
    if (!t.defined() || t.dim() == 0) return;
    TORCH_CHECK(!first || *first == t.device(),
                "Expected all tensors to be on the same device, but found at least two devices, ",
                *first, " and ", t.device(), "! (when checking arguments of ", name, ")");
    first = t.device();
  }
  void check(const std::optional<at::Tensor>& t) {
    if (t) check(*t);
  }
};
static at::Tensor conv(const at::Tensor& x, const at::Tensor& w,
                       const std::optional<at::Tensor>& b, c10::SymIntArrayRef st,
                       c10::SymIntArrayRef p, c10::SymIntArrayRef dl, bool tr,
                       c10::SymIntArrayRef op, c10::SymInt g) {
  need_kernel("aten::convolution_overrideable");
  OneDevice one{"aten::convolution_overrideable"};
  one.check(x), one.check(w), one.check(b);
  std::optional<at::Tensor> bb;
  if (b && b->defined()) bb = as_cpu(*b);
  return to_card(at::convolution(as_cpu(x), as_cpu(w), bb, C10_AS_INTARRAYREF_SLOW(st),
                                 C10_AS_INTARRAYREF_SLOW(p), C10_AS_INTARRAYREF_SLOW(dl), tr,
                                 C10_AS_INTARRAYREF_SLOW(op), g.expect_int()),
                 x.device());
}
static std::tuple<at::Tensor, at::Tensor, at::Tensor> conv_back(
    const at::Tensor& gy, const at::Tensor& x, const at::Tensor& w, c10::SymIntArrayRef st,
    c10::SymIntArrayRef p, c10::SymIntArrayRef dl, bool tr, c10::SymIntArrayRef op, c10::SymInt g,
    std::array<bool, 3> mask) {
  auto bias = at::IntArrayRef();
  std::vector<int64_t> bs{tr ? w.size(1) * g.expect_int() : w.size(0)};
  bias = bs;
  auto r =
      at::convolution_backward(as_cpu(gy), as_cpu(x), as_cpu(w), bias, C10_AS_INTARRAYREF_SLOW(st),
                               C10_AS_INTARRAYREF_SLOW(p), C10_AS_INTARRAYREF_SLOW(dl), tr,
                               C10_AS_INTARRAYREF_SLOW(op), g.expect_int(), mask);
  return {to_card(std::get<0>(r), x.device()), to_card(std::get<1>(r), x.device()),
          to_card(std::get<2>(r), x.device())};
}
// The fallback would update copies of the running statistics.
static std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(
    const at::Tensor& x, const std::optional<at::Tensor>& w, const std::optional<at::Tensor>& b,
    const std::optional<at::Tensor>& mean, const std::optional<at::Tensor>& var, bool training,
    double momentum, double eps) {
  need_kernel("aten::native_batch_norm");
  OneDevice one{"aten::native_batch_norm"};
  one.check(x), one.check(w), one.check(b), one.check(mean), one.check(var);
  auto host = [](const std::optional<at::Tensor>& t) {
    return t && t->defined() ? std::optional<at::Tensor>(as_cpu(*t)) : std::nullopt;
  };
  auto r = at::native_batch_norm(as_cpu(x), host(w), host(b), host(mean), host(var), training,
                                 momentum, eps);
  return {to_card(std::get<0>(r), x.device()), to_card(std::get<1>(r), x.device()),
          to_card(std::get<2>(r), x.device())};
}
// PyTorch asks a PrivateUse1 card for fused LSTM cells, which the CPU does not have.
static std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(
    const at::Tensor& input_gates, const at::Tensor& hidden_gates, const at::Tensor& cx,
    const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& hidden_bias) {
  auto gates = as_cpu(input_gates) + as_cpu(hidden_gates);
  for (auto& bias : {input_bias, hidden_bias})
    if (bias && bias->defined()) gates = gates + as_cpu(*bias);
  auto parts = gates.chunk(4, 1);
  auto in = parts[0].sigmoid(), forget = parts[1].sigmoid(), out = parts[3].sigmoid();
  auto cell = parts[2].tanh();
  auto cy = forget * as_cpu(cx) + in * cell;
  auto workspace = at::cat({in, forget, cell, out}, 1);
  return {to_card(out * cy.tanh(), cx.device()), to_card(cy, cx.device()),
          to_card(workspace, cx.device())};
}
static std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_back(
    const std::optional<at::Tensor>& grad_hy, const std::optional<at::Tensor>& grad_cy,
    const at::Tensor& cx, const at::Tensor& cy, const at::Tensor& workspace, bool has_bias) {
  auto parts = as_cpu(workspace).chunk(4, 1);
  auto in = parts[0], forget = parts[1], cell = parts[2], out = parts[3];
  auto tanh = as_cpu(cy).tanh();
  auto host = [&](const std::optional<at::Tensor>& t) {
    return t && t->defined() ? as_cpu(*t) : at::zeros_like(tanh);
  };
  auto gh = host(grad_hy), gc = host(grad_cy) + gh * out * (1 - tanh * tanh);
  auto gates = at::cat({gc * cell * in * (1 - in), gc * as_cpu(cx) * forget * (1 - forget),
                        gc * in * (1 - cell * cell), gh * tanh * out * (1 - out)},
                       1);
  auto bias = has_bias ? to_card(gates.sum(0), cx.device()) : at::Tensor();
  return {to_card(gates, cx.device()), to_card(gc * forget, cx.device()), bias};
}
// The fallback alone would take tensors of any devices. Indices come in lists that may be on the host.
static void need_one_device(const c10::OperatorHandle& op, const torch::jit::Stack& st) {
  OneDevice one{op.schema().name()};
  const auto count = op.schema().arguments().size();
  for (auto it = st.end() - count; it != st.end(); ++it) {
    if (it->isTensor()) one.check(it->toTensor());
    if (it->isTensorList())
      for (const at::Tensor& t : it->toTensorVector()) one.check(t);
    if (it->isOptionalTensorList())
      for (const std::optional<at::Tensor>& t : it->toOptionalTensorVector())
        if (t && !t->is_cpu()) one.check(*t);
  }
}
static void fallback(const c10::OperatorHandle& op, torch::jit::Stack* st) {
  if (!g_left_out.empty()) need_kernel(op.schema().name(), &op);
  if (!g_falls_back) need_one_device(op, *st);
  at::native::cpu_fallback(op, st);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}
// What mixed precision casts, as far as the tests go.
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(log_softmax, int, fp32)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
  KERNEL_PRIVATEUSEONE(nll_loss, fp32)
}
// As vendors register them: before PyTorch 2.5 they ask CUDA unless they are told a device.
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 5
static bool is_pinned(const at::Tensor& t, std::optional<at::Device>) {
  return t.is_cpu() && g_pinned.holds(t.storage().data());
}
static at::Tensor pin_memory(const at::Tensor& t, std::optional<at::Device>) {
  return at::empty(t.sizes(), t.options().pinned_memory(true)).copy_(t);
}
TORCH_LIBRARY_IMPL(aten, BackendSelect, m) {
  m.impl("is_pinned", is_pinned);
  m.impl("_pin_memory", pin_memory);
}
#endif
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", e_mf);
  m.impl("empty_strided", e_st);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("as_strided", strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_st);
  m.impl("set_.source_Storage", set_plain);
  m.impl("view", view);
  m.impl("unfold", unfold);
  m.impl("native_batch_norm", batch_norm);
  // Without a kernel of the card PyTorch computes these by formulas, with other roundings.
  for (auto name : {"mish_backward", "native_group_norm", "native_layer_norm", "silu_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_back);
  m.impl("convolution_overrideable", conv);
  m.impl("convolution_backward_overrideable", conv_back);
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("install", [](bool hooks) {
    if (hooks) at::RegisterPrivateUse1HooksInterface(&g_hooks);
    else at::RegisterPrivateUse1HooksInterface(&g_bare_hooks);
    torch::profiler::impl::registerPrivateUse1Methods(&g_profiler);
  });
  m.def("device_count", [] { return g_count; });
  m.def("set_count", [](int n) { g_count = n; });
  m.def("current_device", [] { return g_current; });
  m.def("set_device", [](int i) {
    CardGuard().setDevice(c10::Device(kCard, static_cast<c10::DeviceIndex>(i)));
  });
  m.def("leave_out", [](std::set<std::string> names) { g_left_out = std::move(names); });
  m.def("fall_back", [](bool yes) { g_falls_back = yes; });
  m.def("set_limit", [](size_t n) { g_limit = n; });
  m.def("memory_limit", [] { return g_limit; });
  m.def("empty_cache", [] { g_cache->clear(); });
  m.def("memory_allocated", [](int i) { return g_bytes[i]; });
}
