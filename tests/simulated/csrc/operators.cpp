// Torch's operators on the simulated device: memory and views by hand, the rest by the CPU's
// kernels, enqueued.
//
// A task holds addresses and no tensors: what the program frees is free, however far the device
// lags behind.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <mutex>

#include "device.h"

namespace simulated {
namespace {

using c10::IValue;
using torch::jit::Stack;

bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDevice;
}

// The bytes between a tensor's first and last element.
size_t extent(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return static_cast<size_t>(last + 1) * tensor.element_size();
}

Range range_of(const at::Tensor& tensor, bool written, bool surely = false) {
  const bool dense = tensor.is_non_overlapping_and_dense();
  return {tensor.const_data_ptr(), extent(tensor), written, surely && dense};
}

// The same memory to the CPU's kernels.
at::Tensor on_cpu(const at::Tensor& tensor) {
  return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(),
                       tensor.options().device(at::kCPU));
}

at::Tensor own_copy(const at::Tensor& tensor) {
  at::Tensor copy = tensor.detach().clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return copy;
}

at::Tensor as_meta(const at::Tensor& tensor) {
  if (!tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0)) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

// `value` with each tensor in it replaced.
template <class Replace>
IValue replaced(const IValue& value, const Replace& replace) {
  if (value.isTensor()) return replace(value.toTensor());
  if (value.isTensorList()) {
    std::vector<at::Tensor> all;
    for (const at::Tensor& tensor : value.toTensorVector()) all.push_back(replace(tensor));
    return all;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> all;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      all.push_back(tensor ? std::optional(replace(*tensor)) : std::nullopt);
    }
    return all;
  }
  return value;
}

template <class Visit>
void each_tensor(const IValue& value, const Visit& visit) {
  replaced(value, [&](const at::Tensor& tensor) {
    if (tensor.defined()) visit(tensor);
    return tensor;
  });
}

// --- Memory, views and copies ---

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, c10::GetAllocator(kDevice),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, c10::GetAllocator(kDevice),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

void copy_bytes(void* to, const void* from, size_t bytes) {
  enqueue(current_stream(), {"copy",
                             [=] { std::memcpy(to, from, bytes); },
                             {{from, bytes, false, true}, {to, bytes, true, true}}});
}

void resize_bytes(const c10::Storage& storage, size_t bytes) {
  const c10::DeviceGuard guard(storage.device());
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  c10::DataPtr data = c10::GetAllocator(kDevice)->allocate(bytes);
  const size_t kept = std::min(bytes, impl->nbytes());
  if (kept > 0) copy_bytes(data.get(), impl->data(), kept);
  impl->set_data_ptr_noswap(std::move(data));
  impl->set_nbytes(bytes);
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size,
                         std::optional<at::MemoryFormat>) {
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  const size_t bytes = (self.numel() + self.storage_offset()) * self.element_size();
  if (self.numel() > 0 && bytes > self.storage().nbytes()) resize_bytes(self.storage(), bytes);
  return self;
}

at::Tensor& set_storage_at(at::Tensor& self, at::Storage source, int64_t offset,
                           at::IntArrayRef size, at::IntArrayRef stride) {
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.data() == nullptr && !size.empty()) {
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride);
  }
  TORCH_CHECK(
      self.numel() == 0 || offset * self.element_size() + extent(self) <= self.storage().nbytes(),
      "set_: the storage is too small");
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const auto numel = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_storage_at(self, std::move(source), 0, {numel}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage_at(self, source.storage(), source.storage_offset(), source.sizes(),
                        source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  return set_tensor(self, at::empty({0}, self.options()));
}

// Copies as CUDA does: from and to memory that is not pinned the host waits, whatever it asked for.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  if (self.numel() == 0 && to.numel() == 0) return to;
  const at::Tensor& device_side = is_ours(to) ? to : self;
  const c10::DeviceGuard guard(device_side.device());
  const c10::Stream stream = current_stream();
  const bool within = is_ours(self) && is_ours(to);
  const at::Tensor& host_side = is_ours(to) ? self : to;
  const bool pinned = !within && is_pinned(host_side.const_data_ptr());
  const at::Tensor from = on_cpu(self);
  const at::Tensor target = on_cpu(to);
  Task task{"copy", [from, target] {
              const at::NoGradGuard no_grad;
              target.copy_(from);
            }};
  if (is_ours(self)) task.ranges.push_back(range_of(self, false));
  if (is_ours(to)) task.ranges.push_back(range_of(to, true));
  if (within || (pinned && non_blocking)) {
    enqueue(stream, std::move(task));
    if (pinned) use_pinned(host_side.const_data_ptr(), record(stream));
    return to;
  }
  task.name = is_ours(to) ? "copy to the device" : "copy to the host";
  run_and_wait(stream, std::move(task));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  at::Scalar value;
  const at::Tensor from = on_cpu(self);
  run_and_wait(current_stream(), {"item", [&] { value = from.item(); }, {range_of(self, false)}});
  return value;
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  use_on(self.storage().data_ptr(), stream);
}

// --- Everything else ---

// The CPU's kernel keeps statistics in the dtype of the weight, where CUDA's, and meta's, keeps
// them in fp32.
void lower_statistics(Stack& stack) {
  const at::Tensor& input = stack[1].toTensor();
  const auto weight = stack[5].toOptional<at::Tensor>();
  const auto dtype = weight && weight->defined() ? weight->scalar_type() : input.scalar_type();
  for (const size_t i : {3, 4}) stack[i] = stack[i].toTensor().to(dtype);
}

void run_on_cpu(const c10::OperatorHandle& op, Stack& stack) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const at::NoGradGuard no_grad;
  op.callBoxed(&stack);
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

uint64_t next_seed = 0;  // of the operators that draw random numbers

// A call of an operator on tensors of the device.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack& stack)
      : op_(op),
        arguments_(op.schema().arguments()),
        results_(op.schema().returns()),
        values_(stack.end() - static_cast<std::ptrdiff_t>(arguments_.size()), stack.end()),
        device_(device()) {}

  void run(Stack& stack) {
    const c10::DeviceGuard guard(device_);
    std::vector<IValue> results;
    if (!find_results(results)) {
      results = run_now();
    } else {
      enqueue(current_stream(), make_task(results));
    }
    stack.erase(stack.end() - static_cast<std::ptrdiff_t>(arguments_.size()), stack.end());
    for (IValue& result : results) stack.push_back(std::move(result));
  }

 private:
  at::Device device() const {
    std::optional<at::Device> found;
    for (const IValue& value : values_) {
      each_tensor(value, [&](const at::Tensor& tensor) {
        if (is_ours(tensor) && !found) found = tensor.device();
      });
    }
    TORCH_CHECK(found, name(), ": no tensor is on the simulated device");
    return *found;
  }

  std::string name() const { return op_.schema().name(); }

  bool is_out(size_t i) const { return is_written(arguments_[i]) && arguments_[i].kwarg_only(); }

  // The tensors to return: those written to, and new ones for the others. False where their shapes
  // are not to be known.
  bool find_results(std::vector<IValue>& results) {
    bool needs_shapes = false;
    for (size_t i = 0; i < values_.size(); ++i) {
      if (is_out(i)) {
        each_tensor(values_[i], [&](const at::Tensor& t) { needs_shapes |= t.numel() == 0; });
      }
    }
    for (const c10::Argument& result : results_) needs_shapes |= !is_written(result);
    Stack meta;
    if (needs_shapes && !call_on_meta(meta)) return false;
    size_t written = 0;
    for (size_t r = 0; r < results_.size(); ++r) {
      if (is_written(results_[r])) {
        while (!is_written(arguments_[written])) ++written;
        results.push_back(values_[written++]);
        if (needs_shapes && results.back().isTensor()) fit(results.back().toTensor(), meta[r]);
        continue;
      }
      TORCH_CHECK(results_[r].alias_info() == nullptr, name(),
                  ": a view that the simulated device does not know");
      if (!results_[r].type()->isSubtypeOf(*c10::TensorType::get()) && !meta[r].isTensorList()) {
        return false;
      }
      results.push_back(replaced(meta[r], [&](const at::Tensor& like) {
        if (!like.defined()) return like;
        return at::empty_strided(like.sizes(), like.strides(), like.options().device(device_));
      }));
    }
    return true;
  }

  static void fit(const at::Tensor& out, const IValue& like) {
    if (out.numel() == 0) out.resize_(like.toTensor().sizes());
  }

  bool call_on_meta(Stack& meta) const {
    for (const IValue& value : values_) {
      if (value.isDevice()) {
        meta.emplace_back(at::Device(at::kMeta));
      } else if (value.isGenerator()) {
        meta.emplace_back();
      } else {
        meta.push_back(replaced(value, as_meta));
      }
    }
    try {
      run_on_cpu(op_, meta);
      return true;
    } catch (const std::exception&) {
      return false;  // if the call is wrong, the CPU's kernel says why
    }
  }

  Stack cpu_stack() const {
    Stack stack;
    for (size_t i = 0; i < values_.size(); ++i) {
      if (values_[i].isDevice()) {
        stack.emplace_back(at::Device(at::kCPU));
      } else if (arguments_[i].name() == "generator") {
        stack.emplace_back(at::make_generator<at::CPUGeneratorImpl>(++next_seed));
      } else {
        stack.push_back(replaced(values_[i], [](const at::Tensor& tensor) {
          if (!tensor.defined()) return tensor;
          return is_ours(tensor) ? on_cpu(tensor) : own_copy(tensor);
        }));
      }
    }
    return stack;
  }

  Task make_task(const std::vector<IValue>& results) const {
    Task task{name(), nullptr};
    for (size_t i = 0; i < values_.size(); ++i) {
      each_tensor(values_[i], [&](const at::Tensor& tensor) {
        if (is_ours(tensor)) task.ranges.push_back(range_of(tensor, is_written(arguments_[i])));
      });
    }
    std::vector<std::vector<at::Tensor>> targets(results.size());
    for (size_t r = 0; r < results.size(); ++r) {
      if (is_written(results_[r])) continue;
      each_tensor(results[r], [&](const at::Tensor& tensor) {
        task.ranges.push_back(range_of(tensor, true));
        targets[r].push_back(on_cpu(tensor));
      });
    }
    task.run = [op = op_, stack = cpu_stack(), targets = std::move(targets)] {
      Stack values = stack;
      if (op.schema().name() == "aten::native_layer_norm_backward") lower_statistics(values);
      run_on_cpu(op, values);
      const at::NoGradGuard no_grad;
      for (size_t r = 0; r < targets.size(); ++r) {
        if (targets[r].empty()) continue;
        auto target = targets[r].begin();
        each_tensor(values[r], [&](const at::Tensor& tensor) { (target++)->copy_(tensor); });
      }
    };
    return task;
  }

  // Runs at once where the device has to say what comes out: its shape, or a number.
  std::vector<IValue> run_now() {
    Stack stack = cpu_stack();
    std::exception_ptr error;
    const auto work = [&] {
      try {
        run_on_cpu(op_, stack);
        for (size_t r = 0; r < results_.size(); ++r) {  // what lies in closed memory is copied out
          if (!is_written(results_[r])) stack[r] = replaced(stack[r], own_copy_if_any);
        }
      } catch (...) {
        error = std::current_exception();
      }
    };
    run_and_wait(current_stream(), {name(), work});
    if (error) std::rethrow_exception(error);
    std::vector<IValue> results;
    size_t written = 0;
    for (size_t r = 0; r < results_.size(); ++r) {
      if (is_written(results_[r])) {
        while (!is_written(arguments_[written])) ++written;
        const at::Tensor& target = values_[written++].toTensor();
        fit(target, stack[r]);
        results.emplace_back(target);
      } else {
        results.push_back(replaced(stack[r], [&](const at::Tensor& t) { return uploaded(t); }));
      }
    }
    return results;
  }

  at::Tensor uploaded(const at::Tensor& tensor) const {
    if (!tensor.defined()) return tensor;
    at::Tensor ours =
        at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device_));
    enqueue(current_stream(), {name(),
                               [tensor, to = on_cpu(ours)] {
                                 const at::NoGradGuard no_grad;
                                 to.copy_(tensor);
                               },
                               {range_of(ours, true)}});
    return ours;
  }

  static at::Tensor own_copy_if_any(const at::Tensor& tensor) {
    return tensor.defined() ? own_copy(tensor) : tensor;
  }

  const c10::OperatorHandle op_;
  const std::vector<c10::Argument>& arguments_;
  const std::vector<c10::Argument>& results_;
  std::vector<IValue> values_;
  at::Device device_;
};

void fallback(const c10::OperatorHandle& op, Stack* stack) { Call(op, *stack).run(*stack); }

void convolution(const c10::OperatorHandle&, Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  fallback(op, stack);
}

void convolution_backward(const c10::OperatorHandle&, Stack* stack) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  const auto outputs = (stack->end() - 10)->toTensor().size(1);
  stack->insert(stack->end() - 7, IValue(std::vector<int64_t>{outputs}));  // the bias's sizes
  fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view",
         static_cast<at::Tensor (*)(const at::Tensor&, at::IntArrayRef)>(&at::native::view));
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage_at);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("record_stream", &record_stream);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable",
         torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return guard().deviceCount(); }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    guard().setDevice({kDevice, device});
  }
  c10::DeviceIndex getCurrentDevice() const override { return guard().getDevice().index(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return guard().exchangeDevice({kDevice, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_bytes(storage, bytes);
  }

 private:
  static c10::impl::VirtualGuardImpl guard() { return c10::impl::VirtualGuardImpl(kDevice); }
};

const bool hooked = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

void seed_operators(uint64_t seed) { next_seed = seed << 32; }

}  // namespace simulated
