// DLA segments by the board's TensorRT: plans that `tandem-agent prepare` finished, tensors brought into the DLA's
// formats by the CPU (device/runtime/executors/tensorrt.py is the same in Python).
#include "executor.hpp"

#ifdef TANDEM_TENSORRT

#include <NvInfer.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>

#include "driver.hpp"
#include "plans.hpp"

namespace tandem::internal {
namespace {

constexpr std::size_t kPortVector = 32;  // bytes of a vector of channels in chw16 and chw32

// TensorRT keeps the first logger of a process for as long as it runs, so there is one. It keeps the last error.
class LastError final : public nvinfer1::ILogger {
 public:
  void log(Severity severity, const char* text) noexcept override {
    if (severity > Severity::kERROR) return;
    const std::lock_guard lock(mutex_);
    std::strncpy(text_, text, sizeof text_ - 1);
    std::replace(text_, text_ + std::strlen(text_), '\n', ' ');
  }
  // ": " and the error since the last call, "" if there was none.
  std::string take() {
    const std::lock_guard lock(mutex_);
    const std::string text = text_[0] == '\0' ? "" : std::string(": ") + text_;
    text_[0] = '\0';
    return text;
  }

 private:
  std::mutex mutex_;
  char text_[512] = "";
};

LastError& last_of_tensorrt() {
  static LastError& one = *new LastError;
  return one;
}

// 8.6.2 is 8602, 10.3.0 is 100300.
std::string tensorrt_version() {
  const int number = getInferLibVersion(), major = number >= 10000 ? 10000 : 1000;
  return sentence(number / major, ".", number % major / 100, ".", number % 100);
}

// -- values ---------------------------------------------------------------------------------------------

struct Half {
  std::uint16_t bits;
};

template <typename To, typename From>
To bits_as(From value) {
  To result;
  static_assert(sizeof result == sizeof value);
  std::memcpy(&result, &value, sizeof value);
  return result;
}

float real_of(float value) { return value; }
float real_of(std::int8_t value) { return value; }
float real_of(Half value) {
  const int exponent = value.bits >> 10 & 31, fraction = value.bits & 1023;
  const auto sign = static_cast<std::uint32_t>(value.bits & 0x8000) << 16;
  if (exponent == 31) return bits_as<float>(sign | 0x7f800000u | static_cast<std::uint32_t>(fraction) << 13);
  const float size = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                   : std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
  return sign != 0 ? -size : size;
}

// To the nearest, halves to the even one, as NumPy converts.
void put(Half& target, float value, float) {
  auto bits = bits_as<std::uint32_t>(value);
  const std::uint32_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  std::uint32_t half = 0x7c00;
  if (bits > 0x7f800000)
    half |= std::max<std::uint32_t>(bits >> 13 & 0x3ff, 1);
  else if (bits < 0x38800000)  // adding 0.5 rounds to steps of 2^-24
    half = bits_as<std::uint32_t>(bits_as<float>(bits) + 0.5f) - 0x3f000000;
  else if (bits < 0x47800000)
    half = (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13;
  target.bits = static_cast<std::uint16_t>(sign | half);
}
void put(float& target, float value, float) { target = value; }
// Halves round away from zero, as the DLA rounds.
void put(std::int8_t& target, float value, float scale) {
  const float scaled = value / scale, rounded = std::trunc(scaled + std::copysign(0.5f, scaled));
  target = rounded != rounded ? std::int8_t{0} : static_cast<std::int8_t>(std::clamp(rounded, -128.0f, 127.0f));
}

// -- an input or output -----------------------------------------------------------------------------------

// Its page-locked memory on the host and its memory on the GPU, in the DLA's format.
struct PlanPort {
  const Port* port;
  std::vector<std::int64_t> shape;
  int dtype;
  std::size_t n, c, h, w, lanes;
  char* host;
  cuda::Address address;
  std::vector<char> own;  // of an output that has no place

  std::size_t elements() const { return n * c * h * w; }
  std::size_t bytes() const { return n * ((c + lanes - 1) / lanes) * h * w * kPortVector; }

  // Calls `copy` with the place of each element in C order and in [N, ceil(C / lanes), H, W, lanes].
  template <typename Copy>
  void each(Copy copy) const {
    const std::size_t vectors = (c + lanes - 1) / lanes;
    std::size_t plain = 0;
    for (std::size_t in = 0; in < n; ++in)
      for (std::size_t ic = 0; ic < c; ++ic)
        for (std::size_t ih = 0; ih < h; ++ih)
          for (std::size_t iw = 0; iw < w; ++iw)
            copy(plain++, (((in * vectors + ic / lanes) * h + ih) * w + iw) * lanes + ic % lanes);
  }

  template <typename Stored, typename Plain>
  void pack(const Plain* tensor) const {
    auto* memory = reinterpret_cast<Stored*>(host);
    const auto scale = static_cast<float>(port->scale.value_or(1.0));
    if constexpr (std::is_same_v<Stored, Plain>)
      each([&](std::size_t plain, std::size_t packed) { memory[packed] = tensor[plain]; });
    else
      each([&](std::size_t plain, std::size_t packed) { put(memory[packed], real_of(tensor[plain]), scale); });
  }

  template <typename Stored, typename Plain>
  void unpack(Plain* tensor) const {
    const auto* memory = reinterpret_cast<const Stored*>(host);
    const auto scale = static_cast<float>(port->scale.value_or(1.0));
    if constexpr (std::is_same_v<Stored, Plain>)
      each([&](std::size_t plain, std::size_t packed) { tensor[plain] = memory[packed]; });
    else
      each([&](std::size_t plain, std::size_t packed) { put(tensor[plain], real_of(memory[packed]) * scale, 1.0f); });
  }

  // Calls `work` with null pointers of the stored and of the tensor's type.
  template <typename Work>
  void with_types(Work work) const {
    const bool quantized = port->dtype == "int8", half = dtype == dtype_named("float16");
    if (dtype == dtype_named("int8") && quantized) return work((std::int8_t*)nullptr, (std::int8_t*)nullptr);
    if (half) return quantized ? work((std::int8_t*)nullptr, (Half*)nullptr) : work((Half*)nullptr, (Half*)nullptr);
    return quantized ? work((std::int8_t*)nullptr, (float*)nullptr) : work((Half*)nullptr, (float*)nullptr);
  }
};

// -- the executor -------------------------------------------------------------------------------------------

// TensorRT's objects on one DLA core; they end in the reverse order.
struct CorePlan {
  int core;
  std::unique_ptr<nvinfer1::IRuntime> runtime;
  std::unique_ptr<nvinfer1::ICudaEngine> engine;
  std::unique_ptr<nvinfer1::IExecutionContext> context;
};

class TensorRTExecutor final : public Executor {
 public:
  TensorRTExecutor(Engine& engine, const Segment& segment, const TensorRT& part)
      : driver_(cuda::Driver::get()), where_(engine.path() + ": segment " + quoted(segment.name)) {
    const FinishedPlan plan = read_plan(engine, part, tensorrt_version());
    const cuda::CurrentContext current(driver_);
    driver_.check(driver_.retain_context(&context_, 0), "cuDevicePrimaryCtxRetain");
    try {
      load(plan.bytes, segment, part);
      driver_.check(driver_.create_stream(&stream_, cuda::kStreamNonBlocking), "cuStreamCreate");
      for (const auto* ports : {&part.inputs, &part.outputs})
        for (const Port& port : *ports) take(port, engine.facts().tensor(port.tensor));
    } catch (...) {
      close();
      throw;
    }
    describe(part, plan.fallback);
  }

  ~TensorRTExecutor() override {
    try {
      const cuda::CurrentContext current(driver_);
      close();
    } catch (const SessionError&) {  // after a fault on the GPU every call fails
    }
  }
  TensorRTExecutor(const TensorRTExecutor&) = delete;
  TensorRTExecutor& operator=(const TensorRTExecutor&) = delete;

  void run(const std::vector<View>& inputs, std::vector<View>& outputs, const std::vector<Int>&) override {
    const cuda::CurrentContext current(driver_);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const PlanPort& port = ports_[i];
      port.with_types([&](auto* stored, auto* plain) {
        port.pack<std::remove_pointer_t<decltype(stored)>>(static_cast<decltype(plain)>(inputs[i].data));
      });
      driver_.check(driver_.upload(port.address, port.host, port.bytes(), stream_), "cuMemcpyHtoDAsync");
    }
    start();
    for (std::size_t i = inputs.size(); i < ports_.size(); ++i)
      driver_.check(driver_.download(ports_[i].host, ports_[i].address, ports_[i].bytes(), stream_), "cuMemcpyDtoHAsync");
    driver_.check(driver_.synchronize(stream_), "cuStreamSynchronize");
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      PlanPort& port = ports_[inputs.size() + i];
      if (outputs[i].data == nullptr) {
        port.own.resize(port.elements() * static_cast<std::size_t>(kDtypes[port.dtype].bytes));
        outputs[i].data = port.own.data();
      }
      outputs[i].shape = port.shape;
      port.with_types([&](auto* stored, auto* plain) {
        port.unpack<std::remove_pointer_t<decltype(stored)>>(static_cast<decltype(plain)>(outputs[i].data));
      });
    }
  }

  std::string description() const override { return description_; }

 private:
  // On the core of the segment, or on all where frames take turns.
  void load(const std::string& bytes, const Segment& segment, const TensorRT& part) {
    const int first = part.take_turns ? 0 : std::atoi(segment.processor.substr(3).c_str());  // "dla0"
    int count = 0, core = first;
    do {
      last_of_tensorrt().take();
      CorePlan plan{core, nullptr, nullptr, nullptr};
      plan.runtime.reset(nvinfer1::createInferRuntime(last_of_tensorrt()));
      if (!plan.runtime) refuse_session("TensorRT ", tensorrt_version(), " does not start", last_of_tensorrt().take());
      count = plan.runtime->getNbDLACores();
      if (core >= count) refuse_session("it is for DLA core ", core, ", and this board has ", count);
      plan.runtime->setDLACore(core);
      plan.engine.reset(plan.runtime->deserializeCudaEngine(bytes.data(), bytes.size()));
      if (!plan.engine)
        refuse_session("TensorRT ", tensorrt_version(), " does not load its plan: run `tandem-agent prepare --again`",
                       last_of_tensorrt().take());
      plan.context.reset(plan.engine->createExecutionContext());
      if (!plan.context)
        refuse_session("DLA core ", core, " has no room for its plan; a core holds 16 loadables, of all programs "
                       "together", last_of_tensorrt().take());
      plans_.push_back(std::move(plan));
    } while (part.take_turns && ++core < count);
  }

  void take(const Port& port, const TensorInfo& tensor) {
    const int dtype = dtype_named(tensor.dtype);
    if (dtype != dtype_named("float32") && dtype != dtype_named("float16") &&
        !(dtype == dtype_named("int8") && port.dtype == "int8"))
      refuse_session("its tensor ", quoted(port.tensor), " is ", tensor.dtype, ", its port ", port.dtype);
    PlanPort place{&port, {}, dtype, 1, 1, 1, 1, kPortVector / (port.dtype == "int8" ? 1 : 2), nullptr, 0, {}};
    std::size_t* const sizes[] = {&place.n, &place.c, &place.h, &place.w};
    if (tensor.shape.size() > std::size(sizes)) refuse_session("its tensor ", quoted(port.tensor), " has over 4 dimensions");
    for (const Dim& dim : tensor.shape) {
      const Int* size = std::get_if<Int>(&dim);
      if (size == nullptr) refuse_session("the sizes of its tensor ", quoted(port.tensor), " are not fixed");
      *sizes[place.shape.size()] = static_cast<std::size_t>(*size);
      place.shape.push_back(static_cast<std::int64_t>(*size));
    }
    void* host = nullptr;
    const std::size_t bytes = std::max<std::size_t>(place.bytes(), 1);
    driver_.check(driver_.allocate_host(&host, bytes, 0), "cuMemHostAlloc");
    place.host = static_cast<char*>(host);
    std::memset(host, 0, bytes);  // channels beyond the tensor's stay 0
    ports_.push_back(std::move(place));
    driver_.check(driver_.allocate(&ports_.back().address, bytes), "cuMemAlloc");
  }

  // Enqueues the plan on the core whose turn it is.
  void start() {
    const CorePlan& plan = plans_[frame_++ % plans_.size()];
    last_of_tensorrt().take();
    for (const PlanPort& port : ports_)
      if (!plan.context->setTensorAddress(port.port->tensor.c_str(), reinterpret_cast<void*>(port.address)))
        refuse_session(where_, ": its plan has no input or output ", quoted(port.port->tensor), last_of_tensorrt().take());
    if (!plan.context->enqueueV3(static_cast<cudaStream_t>(stream_)))
      refuse_session(where_, " failed: TensorRT does not enqueue it on DLA core ", plan.core, last_of_tensorrt().take());
  }

  void describe(const TensorRT& part, bool fallback) {
    std::string cores;
    for (const CorePlan& plan : plans_) cores += (cores.empty() ? "" : ", ") + std::to_string(plan.core);
    description_ = sentence("TensorRT ", tensorrt_version(), ", DLA core", plans_.size() > 1 ? "s " : " ", cores,
                            plans_.size() > 1 ? " in turn" : "",
                            part.take_turns && plans_.size() < 2 ? ", the only one here: frames take no turns" : "",
                            ", formats by the CPU", fallback ? ", built with GPU fallback, all layers on the DLA" : "");
  }

  void close() {
    if (stream_ != nullptr) {
      driver_.synchronize(stream_);  // a part of a run that failed may be enqueued
      driver_.destroy_stream(stream_);
    }
    plans_.clear();
    for (const PlanPort& port : ports_) {
      if (port.address != 0) driver_.free(port.address);
      driver_.free_host(port.host);
    }
    driver_.release_context(0);
  }

  const cuda::Driver& driver_;
  std::string where_, description_;
  cuda::Handle context_ = nullptr, stream_ = nullptr;
  std::vector<CorePlan> plans_;
  std::vector<PlanPort> ports_;  // inputs, then outputs
  std::size_t frame_ = 0;
};

}  // namespace

std::unique_ptr<Executor> load_tensorrt(Engine& engine, const Segment& segment, const TensorRT& part) {
  return std::make_unique<TensorRTExecutor>(engine, segment, part);
}

}  // namespace tandem::internal

#else

namespace tandem::internal {

std::unique_ptr<Executor> load_tensorrt(Engine&, const Segment&, const TensorRT&) {
  refuse_session("this libtandem is built without -DTANDEM_TENSORRT=ON");
}

}  // namespace tandem::internal

#endif
