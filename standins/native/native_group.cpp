// A vendor's backend of torch.distributed that takes tensors of its own device alone, carried by
// gloo: what ProcessGroupHCCL and ProcessGroupCNCL offer, refuse and say, without their hardware.
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

using c10d::Work;
using Tensors = std::vector<at::Tensor>;
template <class T>
using Ptr = c10::intrusive_ptr<T>;

// What differs between vendors.
struct Vendor {
  std::string backend;              // "hccl"
  std::string label;                // "NPU", in messages
  std::set<at::ScalarType> dtypes;  // that travel at all
  std::set<at::ScalarType> sums;    // that can be reduced
  bool average = true;              // has ReduceOp.AVG
  bool uneven = true;               // all_gather takes outputs of different sizes
  bool gather = true;
  std::string upper() const {
    std::string name = backend;
    for (auto& letter : name) letter = static_cast<char>(std::toupper(letter));
    return name;
  }
};

// Work of gloo on host copies; what arrived is copied to the device once, when it is there.
struct NativeWork final : Work {
  NativeWork(std::vector<Ptr<Work>> inner, c10d::OpType type, Tensors outputs,
             std::function<void()> finish)
      : Work(-1, type), inner(std::move(inner)), outputs(std::move(outputs)),
        finish(std::move(finish)) {}
  bool isCompleted() override {
    for (auto& work : inner)
      if (!work->isCompleted()) return false;
    return true;
  }
  bool isSuccess() const override {
    for (auto& work : inner)
      if (!work->isSuccess()) return false;
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds timeout) override {
    for (auto& work : inner) work->wait(timeout);
    complete();
    return true;
  }
  void complete() {
    std::call_once(finished, [this] {
      at::NoGradGuard no_grad;
      if (finish) finish();
    });
  }
  Tensors result() override { return outputs; }
  Ptr<c10::ivalue::Future> getFuture() override {
    // As c10d's own, which a vendor may leave as it is.
    TORCH_CHECK_NOT_IMPLEMENTED(!std::getenv("NATIVE_WITHOUT_FUTURES"),
                                "NativeWork::getFuture not implemented");
    std::lock_guard<std::mutex> hold(lock);
    if (future) return future;
    future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()));
    auto self = Ptr<NativeWork>::reclaim_copy(this);
    auto left = std::make_shared<std::atomic<size_t>>(inner.size());
    for (auto& work : inner) {
      // Gloo marks the future before the work: to wait for the work here would take for ever.
      work->getFuture()->addCallback([self, left](c10::ivalue::Future& done) {
        if (done.hasError()) {
          self->future->setErrorIfNeeded(done.exception_ptr());
        } else if (--*left == 0 && !self->future->completed()) {
          self->complete();
          self->future->markCompleted(c10::IValue(self->outputs));
        }
      });
    }
    return future;
  }
  std::vector<Ptr<Work>> inner;
  Tensors outputs;
  std::function<void()> finish;
  std::once_flag finished;
  std::mutex lock;
  Ptr<c10::ivalue::Future> future;
};

class NativeGroup final : public c10d::Backend {
 public:
  NativeGroup(Ptr<c10d::Backend> host, int rank, int size, Vendor vendor)
      : Backend(rank, size), host_(std::move(host)), vendor_(std::move(vendor)) {}

  const std::string getBackendName() const override { return vendor_.backend; }
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 9
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds timeout) override { host_->setTimeout(timeout); }
#endif
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  void startCoalescing() override {
    coalescing_ = true;
    coalesced_.clear();
  }
  Ptr<Work> endCoalescing() override {
    coalescing_ = false;
    if (coalesced_.empty()) return nullptr;
    auto works = std::move(coalesced_);
    coalesced_.clear();
    return c10::make_intrusive<NativeWork>(works, c10d::OpType::COALESCED, Tensors{}, nullptr);
  }

  Ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    one(tensors);
    Tensors hosts{host(tensors[0])};
    return started(host_->broadcast(hosts, opts), c10d::OpType::BROADCAST, tensors, hosts);
  }
  Ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    one(tensors);
    Tensors hosts{to_reduce(tensors[0], opts.reduceOp)};
    auto inner = opts;
    inner.reduceOp = gloo_op(tensors[0], opts.reduceOp);
    auto work = host_->allreduce(hosts, inner);
    return finishing(work, c10d::OpType::ALLREDUCE, tensors,
                     [=, this] { give(tensors[0], averaged(hosts[0], opts.reduceOp)); });
  }
  Ptr<Work> allreduce_coalesced(Tensors& tensors,
                                const c10d::AllreduceCoalescedOptions& opts) override {
    same_device(tensors);
    std::vector<Ptr<Work>> works;
    c10d::AllreduceOptions each;
    each.reduceOp = opts.reduceOp;
    each.timeout = opts.timeout;
    for (auto& tensor : tensors) {
      Tensors alone{tensor};
      works.push_back(allreduce(alone, each));
    }
    return all_of(works, c10d::OpType::COALESCED, tensors);
  }
  Ptr<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    one(tensors);
    Tensors hosts{to_reduce(tensors[0], opts.reduceOp)};
    auto inner = opts;
    inner.reduceOp = gloo_op(tensors[0], opts.reduceOp);
    auto work = host_->reduce(hosts, inner);
    bool root = rank_ == opts.rootRank;
    return finishing(work, c10d::OpType::REDUCE, tensors, [=, this] {
      if (root) give(tensors[0], averaged(hosts[0], opts.reduceOp));
    });
  }
  Ptr<Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                      const c10d::AllgatherOptions& opts) override {
    one(inputs);
    same_device(outputs.back());
    TORCH_CHECK(static_cast<int>(outputs.back().size()) == size_,
                "Tensor list input to scatter/gather must match number of collective participants");
    bool even = true;
    for (auto& output : outputs[0]) even = even && output.numel() == inputs[0].numel();
    TORCH_CHECK(even || vendor_.uneven,
                "All tensor operands to scatter/gather must have the same number of elements");
    if (even) {
      std::vector<Tensors> hosts{like(outputs[0], inputs[0])};
      Tensors sent{host(inputs[0])};
      auto work = host_->allgather(hosts, sent, opts);
      return finishing(work, c10d::OpType::ALLGATHER, outputs[0], [=] {
        for (size_t i = 0; i < outputs[0].size(); ++i)
          give(outputs[0][i], hosts[0][i].view_as(outputs[0][i]));
      });
    }
    // As HCCL does it: every rank broadcasts its own.
    std::vector<Ptr<Work>> works;
    for (int rank = 0; rank < size_; ++rank) {
      c10d::BroadcastOptions each;
      each.rootRank = rank;
      if (rank == rank_) outputs[0][rank].copy_(inputs[0]);
      Tensors alone{outputs[0][rank]};
      works.push_back(broadcast(alone, each));
    }
    return all_of(works, c10d::OpType::ALLGATHER, outputs[0]);
  }
  Ptr<Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                            const c10d::AllgatherOptions& opts) override {
    check(input);
    check(output);
    TORCH_CHECK(input.scalar_type() == output.scalar_type(),
                "output tensor must have the same type as input tensor");
    TORCH_CHECK(input.numel() * size_ == output.numel(),
                "output tensor size must be equal to world_size times input tensor size");
    auto whole = at::empty({size_, input.numel()}, input.options().device(at::kCPU));
    std::vector<Tensors> hosts{whole.unbind(0)};
    Tensors sent{host(input).view(-1)};
    auto work = host_->allgather(hosts, sent, opts);
    return finishing(work, c10d::OpType::_ALLGATHER_BASE, {output},
                     [=] { give(output, at::stack(hosts[0]).view_as(output)); });
  }
  Ptr<Work> allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                            const c10d::AllgatherOptions& opts) override {
    std::vector<Ptr<Work>> works;
    for (size_t i = 0; i < outputs.size(); ++i)
      works.push_back(_allgather_base(outputs[i], inputs[i], opts));
    return all_of(works, c10d::OpType::COALESCED, outputs);
  }
  Ptr<Work> reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                           const c10d::ReduceScatterOptions& opts) override {
    one(outputs);
    same_device(inputs.back());
    TORCH_CHECK(static_cast<int>(inputs[0].size()) == size_,
                "Tensor list input to scatter/gather must match number of collective participants");
    for (auto& input : inputs[0])
      TORCH_CHECK(input.sizes() == outputs[0].sizes(),
                  "All tensor operands to scatter/gather must have the same size");
    return scattered(outputs[0], at::stack(inputs[0]), opts, c10d::OpType::REDUCE_SCATTER);
  }
  Ptr<Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                 const c10d::ReduceScatterOptions& opts) override {
    check(input);
    check(output);
    TORCH_CHECK(input.scalar_type() == output.scalar_type(),
                "input tensor must be the same type as the output tensor.");
    TORCH_CHECK(input.numel() == output.numel() * size_,
                "input tensor must be the same size as output size times world size");
    return scattered(output, input, opts, c10d::OpType::_REDUCE_SCATTER_BASE);
  }
  Ptr<Work> reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                            const c10d::ReduceScatterOptions& opts) override {
    std::vector<Ptr<Work>> works;
    for (size_t i = 0; i < outputs.size(); ++i)
      works.push_back(_reduce_scatter_base(outputs[i], inputs[i], opts));
    return all_of(works, c10d::OpType::COALESCED, outputs);
  }
  Ptr<Work> gather(std::vector<Tensors>& outputs, Tensors& inputs,
                   const c10d::GatherOptions& opts) override {
    one(inputs);
    if (!vendor_.gather)
      throw std::runtime_error("ProcessGroup" + vendor_.upper() + " does not support gather");
    bool root = rank_ == opts.rootRank;
    std::vector<Tensors> hosts;
    if (root) {
      same_device(outputs[0]);
      hosts.push_back(like(outputs[0], inputs[0]));
    }
    Tensors sent{host(inputs[0])};
    auto work = host_->gather(hosts, sent, opts);
    return root ? started(work, c10d::OpType::GATHER, outputs[0], hosts[0])
                : finishing(work, c10d::OpType::GATHER, {}, nullptr);
  }
  Ptr<Work> scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                    const c10d::ScatterOptions& opts) override {
    one(outputs);
    std::vector<Tensors> sent;
    if (rank_ == opts.rootRank) {
      same_device(inputs[0]);
      sent.emplace_back();
      for (auto& input : inputs[0]) sent[0].push_back(host(input));
    }
    Tensors hosts{host(outputs[0])};
    return started(host_->scatter(hosts, sent, opts), c10d::OpType::SCATTER, outputs, hosts);
  }
  Ptr<Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& to_split,
                          std::vector<int64_t>& from_split,
                          const c10d::AllToAllOptions& opts) override {
    check(output);
    check(input);
    auto received = host(output);
    auto sent = host(input);
    auto work = host_->alltoall_base(received, sent, to_split, from_split, opts);
    return started(work, c10d::OpType::ALLTOALL_BASE, {output}, {received});
  }
  Ptr<Work> alltoall(Tensors& outputs, Tensors& inputs,
                     const c10d::AllToAllOptions& opts) override {
    TORCH_CHECK(static_cast<int>(outputs.size()) == size_ && outputs.size() == inputs.size(),
                "the size of input_tensors and output_tensors must equal");
    std::vector<int64_t> to_split, from_split;
    Tensors flat;
    for (size_t i = 0; i < outputs.size(); ++i) {
      check(outputs[i]);
      check(inputs[i]);
      to_split.push_back(outputs[i].numel());
      from_split.push_back(inputs[i].numel());
      flat.push_back(host(inputs[i]).view(-1));
    }
    auto sent = at::cat(flat);
    int64_t all = 0;
    for (auto number : to_split) all += number;
    auto received = at::empty({all}, sent.options());
    auto sizes = to_split;  // gloo empties lists of equal sizes
    auto work = host_->alltoall_base(received, sent, to_split, from_split, opts);
    return finishing(work, c10d::OpType::ALLTOALL, outputs, [=] {
      auto parts = received.split_with_sizes(sizes);
      for (size_t i = 0; i < outputs.size(); ++i) give(outputs[i], parts[i].view_as(outputs[i]));
    });
  }
  Ptr<Work> send(Tensors& tensors, int to, int tag) override {
    one(tensors);
    Tensors hosts{host(tensors[0])};
    auto work = host_->send(hosts, to, tag);
    return noted(finishing(work, c10d::OpType::SEND, {}, [hosts] {}));
  }
  Ptr<Work> recv(Tensors& tensors, int from, int tag) override {
    one(tensors);
    Tensors hosts{host(tensors[0])};
    return noted(started(host_->recv(hosts, from, tag), c10d::OpType::RECV, tensors, hosts));
  }
  Ptr<Work> recvAnysource(Tensors&, int) override {
    TORCH_CHECK(false, "ProcessGroup", vendor_.upper(), " does not support recv");
  }
  Ptr<Work> barrier(const c10d::BarrierOptions& opts) override {
    // The vendors' barriers add up a tensor.
    Tensors hosts{at::ones({1})};
    return finishing(host_->allreduce(hosts), c10d::OpType::BARRIER, {}, [hosts] {});
  }

 private:
  void check(const at::Tensor& tensor) const {
    TORCH_CHECK(tensor.device().type() == c10::DeviceType::PrivateUse1 &&
                    tensor.layout() == at::kStrided,
                "Tensors must be ", vendor_.label, " and dense");
    TORCH_CHECK(tensor.is_contiguous(tensor.suggest_memory_format()),
                "Tensors must be contiguous");
    if (!vendor_.dtypes.count(tensor.scalar_type()))
      throw std::runtime_error("Unsupported data type for " + vendor_.upper() + " process group");
  }
  void one(const Tensors& tensors) const {
    TORCH_CHECK(!tensors.empty(), "Tensor list must be nonempty");
    TORCH_CHECK(tensors.size() == 1, "Tensor list mustn't be larger than the number of available ",
                vendor_.label, "s");
    check(tensors[0]);
  }
  void same_device(const Tensors& tensors) const {
    TORCH_CHECK(!tensors.empty(), "Tensor list must be nonempty");
    for (auto& tensor : tensors) {
      check(tensor);
      TORCH_CHECK(tensor.scalar_type() == tensors[0].scalar_type(),
                  "Tensors must have identical type");
      TORCH_CHECK(tensor.device() == tensors[0].device(), "Tensors must be on same ",
                  vendor_.label, " device");
    }
  }
  static at::Tensor host(const at::Tensor& tensor) {
    at::NoGradGuard no_grad;
    return tensor.detach().to(at::kCPU, tensor.scalar_type(), false, true).contiguous();
  }
  static Tensors like(const Tensors& outputs, const at::Tensor& input) {
    Tensors hosts;
    for (size_t i = 0; i < outputs.size(); ++i)
      hosts.push_back(at::empty(input.sizes(), input.options().device(at::kCPU)));
    return hosts;
  }
  static void give(const at::Tensor& device, const at::Tensor& received) {
    device.detach().copy_(received);
  }

  // Reductions ---------------------------------------------------------------------------------
  at::Tensor to_reduce(const at::Tensor& tensor, const c10d::ReduceOp& op) const {
    static const std::map<c10d::ReduceOp::RedOpType, std::string> lacking = {
        {c10d::ReduceOp::BAND, "BAND"}, {c10d::ReduceOp::BOR, "BOR"},
        {c10d::ReduceOp::BXOR, "BXOR"}};
    auto found = lacking.find(op.op_);
    if (found != lacking.end() || (op.op_ == c10d::ReduceOp::AVG && !vendor_.average))
      throw std::runtime_error("Cannot use ReduceOp." +
                               (found == lacking.end() ? std::string("AVG") : found->second) +
                               " with " + vendor_.upper());
    TORCH_CHECK(vendor_.sums.count(tensor.scalar_type()), vendor_.upper(),
                " allreduce: Unsupported data type ", tensor.scalar_type());
    auto copy = host(tensor);
    return tensor.scalar_type() == at::kBool ? copy.to(at::kByte) : copy;
  }
  static c10d::ReduceOp gloo_op(const at::Tensor& tensor, const c10d::ReduceOp& op) {
    if (tensor.scalar_type() == at::kBool && op.op_ == c10d::ReduceOp::SUM)
      return c10d::ReduceOp::MAX;
    return op.op_ == c10d::ReduceOp::AVG ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
  }
  at::Tensor averaged(const at::Tensor& sum, const c10d::ReduceOp& op) const {
    return op.op_ == c10d::ReduceOp::AVG ? sum.div(size_).to(sum.scalar_type()) : sum;
  }
  Ptr<Work> scattered(const at::Tensor& output, const at::Tensor& input,
                      const c10d::ReduceScatterOptions& opts, c10d::OpType type) {
    Tensors hosts{to_reduce(input, opts.reduceOp).view({size_, -1})};
    c10d::AllreduceOptions all;
    all.reduceOp = gloo_op(input, opts.reduceOp);
    all.timeout = opts.timeout;
    auto work = host_->allreduce(hosts, all);
    int rank = rank_;
    return finishing(work, type, {output}, [=, this] {
      give(output, averaged(hosts[0][rank], opts.reduceOp).view_as(output));
    });
  }

  // Works --------------------------------------------------------------------------------------
  Ptr<Work> finishing(Ptr<Work> inner, c10d::OpType type, const Tensors& outputs,
                      std::function<void()> finish) {
    ++sequence_;
    return c10::make_intrusive<NativeWork>(std::vector<Ptr<Work>>{std::move(inner)}, type, outputs,
                                           std::move(finish));
  }
  Ptr<Work> started(Ptr<Work> inner, c10d::OpType type, const Tensors& outputs,
                    const Tensors& hosts) {
    return finishing(std::move(inner), type, outputs, [=] {
      for (size_t i = 0; i < outputs.size(); ++i) give(outputs[i], hosts[i]);
    });
  }
  static Ptr<Work> all_of(const std::vector<Ptr<Work>>& works, c10d::OpType type,
                          const Tensors& outputs) {
    return c10::make_intrusive<NativeWork>(works, type, outputs, nullptr);
  }
  Ptr<Work> noted(Ptr<Work> work) {
    if (coalescing_) coalesced_.push_back(work);
    return work;
  }

  Ptr<c10d::Backend> host_;
  Vendor vendor_;
  bool coalescing_ = false;
  std::vector<Ptr<Work>> coalesced_;
  uint64_t sequence_ = 0;
};

static std::set<at::ScalarType> scalar_types(const py::list& dtypes) {
  std::set<at::ScalarType> types;
  for (auto dtype : dtypes) types.insert(dtype.cast<at::ScalarType>());
  return types;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::module::import("torch.distributed");
  py::object base = py::module::import("torch._C._distributed_c10d").attr("Backend");
  py::class_<NativeGroup, Ptr<NativeGroup>>(m, "NativeGroup", base)
      .def(py::init([](const Ptr<c10d::Backend>& host, int rank, int size,
                       const std::string& backend, const std::string& label,
                       const py::list& dtypes, const py::list& sums, bool average, bool uneven,
                       bool gather) {
             Vendor vendor{backend, label, scalar_types(dtypes), scalar_types(sums),
                           average, uneven, gather};
             return c10::make_intrusive<NativeGroup>(host, rank, size, vendor);
           }),
           py::arg("host"), py::arg("rank"), py::arg("size"), py::kw_only(), py::arg("backend"),
           py::arg("label"), py::arg("dtypes"), py::arg("sums"), py::arg("average"),
           py::arg("uneven"), py::arg("gather"));
}
