// Segments as kernels on an NVIDIA GPU. All memory is taken when a segment is loaded; copies and
// launches of one set of sizes are captured into one CUDA graph, which an inference launches.
#include <algorithm>
#include <cstring>
#include <list>
#include <map>
#include <mutex>

#include "driver.hpp"
#include "executor.hpp"

namespace tandem::internal {
namespace {

using cuda::Address;
using cuda::CurrentContext;
using cuda::Driver;
using cuda::Handle;

constexpr std::size_t kMaxGraphs = 16;        // sets of sizes whose graphs are kept
constexpr std::size_t kHostAlignment = 256;   // that of the workspace's tensors
constexpr Int kDefaultSharedBytes = 48 * 1024;  // a block may use so much without an attribute

// Weights and kernels of a segment, shared by all sessions on the same engine.
class Program {
 public:
  Program(Engine& engine, const Cuda& part) : driver_(Driver::get()), part_(part) {
    driver_.check(driver_.retain_context(&context_, 0), "cuDevicePrimaryCtxRetain");
    try {
      for (const CompiledKernel& kernel : part.kernels) cubins_[kernel.cubin] = engine.section(kernel.cubin);
      const std::string_view bytes = engine.section(part.weights);
      driver_.check(driver_.allocate(&weights, std::max<std::size_t>(bytes.size(), 1)), "cuMemAlloc");
      if (!bytes.empty()) driver_.check(driver_.upload_now(weights, bytes.data(), bytes.size()), "cuMemcpyHtoD");
    } catch (...) {
      close();
      throw;
    }
  }
  ~Program() { close(); }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  // Loaded at the first use, as most tactics never run.
  Handle function(std::size_t kernel) {
    const std::lock_guard lock(mutex_);
    const auto known = functions_.find(kernel);
    if (known != functions_.end()) return known->second;
    const CompiledKernel& compiled = part_.kernels[kernel];
    Handle& module = modules_[compiled.cubin];
    if (module == nullptr)
      driver_.check(driver_.load_module(&module, cubins_.at(compiled.cubin).data()), "cuModuleLoadData");
    Handle function = nullptr;
    driver_.check(driver_.find_function(&function, module, compiled.function.c_str()), "cuModuleGetFunction");
    if (compiled.shared_bytes > kDefaultSharedBytes)
      driver_.check(driver_.set_function_attribute(function, cuda::kMaxDynamicSharedBytes,
                                                   static_cast<int>(compiled.shared_bytes)),
                    "cuFuncSetAttribute");
    return functions_[kernel] = function;
  }

  Address weights = 0;

 private:
  void close() {
    Handle callers = nullptr;
    driver_.current_context(&callers);
    driver_.make_current(context_);
    for (const auto& [name, module] : modules_)
      if (module != nullptr) driver_.unload_module(module);
    if (weights != 0) driver_.free(weights);
    driver_.make_current(callers);
    driver_.release_context(0);
  }

  const Driver& driver_;
  const Cuda& part_;
  Handle context_ = nullptr;
  std::map<std::string, std::string_view> cubins_;
  std::map<std::string, Handle> modules_;
  std::map<std::size_t, Handle> functions_;
  std::mutex mutex_;
};

std::shared_ptr<Program> program_of(Engine& engine, const Segment& segment, const Cuda& part) {
  static std::mutex mutex;
  static auto& programs = *new std::map<std::pair<const Engine*, std::string>, std::weak_ptr<Program>>;
  const std::lock_guard lock(mutex);
  for (auto row = programs.begin(); row != programs.end();)
    row = row->second.expired() ? programs.erase(row) : std::next(row);
  std::weak_ptr<Program>& known = programs[{&engine, segment.name}];
  std::shared_ptr<Program> program = known.lock();
  if (!program) known = program = std::make_shared<Program>(engine, part);
  return program;
}

// An input or output: its page-locked bytes, and its address on the GPU. `mapped`: both are the same.
struct Border {
  const WorkspaceTensor* stored;
  char* host;
  Address address;
  bool mapped;
};

class CudaExecutor final : public Executor {
 public:
  CudaExecutor(Engine& engine, const Segment& segment, const Cuda& part)
      : driver_(Driver::get()),
        engine_(engine),
        part_(part),
        where_(engine.path() + ": segment " + quoted(segment.name)) {
    const CurrentContext current(driver_);
    driver_.check(driver_.retain_context(&context_, 0), "cuDevicePrimaryCtxRetain");
    try {
      program_ = program_of(engine, segment, part);
      take_memory(engine.manifest());
      driver_.check(driver_.create_stream(&stream_, cuda::kStreamNonBlocking), "cuStreamCreate");
      std::vector<Int> point;
      for (const DimRange& dim : engine.manifest().dims) point.push_back(dim.opt);
      graph_at(point);
    } catch (...) {
      close();
      throw;
    }
  }

  ~CudaExecutor() override {
    try {
      const CurrentContext current(driver_);
      close();
    } catch (const SessionError&) {  // after a fault on the GPU every call fails
    }
  }
  CudaExecutor(const CudaExecutor&) = delete;
  CudaExecutor& operator=(const CudaExecutor&) = delete;

  void run(const std::vector<View>& inputs, std::vector<View>& outputs, const std::vector<Int>& point) override {
    const CurrentContext current(driver_);
    const Handle graph = graph_at(point);
    for (std::size_t i = 0; i < inputs.size(); ++i)
      if (inputs[i].shape != shape_at(borders_[i], point))
        refuse_session(where_, ": input ", quoted(borders_[i].stored->tensor), " has another shape at these sizes");
    for (std::size_t i = 0; i < inputs.size(); ++i)
      std::memcpy(borders_[i].host, inputs[i].data, bytes_at(borders_[i], point));
    driver_.check(driver_.launch_graph(graph, stream_), "cuGraphLaunch");
    driver_.check(driver_.synchronize(stream_), "cuStreamSynchronize");
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      const Border& border = borders_[inputs.size() + i];
      const std::vector<std::int64_t> shape = shape_at(border, point);
      if (outputs[i].data == nullptr) {
        outputs[i].data = border.host;
      } else if (outputs[i].shape != shape) {
        refuse_session(where_, ": output ", quoted(border.stored->tensor), " has another shape at these sizes");
      } else {
        std::memcpy(outputs[i].data, border.host, bytes_at(border, point));
      }
      outputs[i].shape = shape;
    }
  }

  std::string description() const override { return driver_.gpu_name() + ", sm_" + std::to_string(driver_.sm()); }

  Address address(std::size_t border) const override { return borders_[border].address; }

  std::vector<std::int64_t> shape(std::size_t border, const std::vector<Int>& point) override {
    if (checked_ != point) check_point(point);
    return shape_at(borders_[border], point);
  }

  void enqueue(const std::vector<Int>& point, Handle stream) override { launch_all(point, stream); }

 private:
  void take_memory(const Manifest& manifest) {
    const bool zero_copy = part_.borders_at && driver_.attribute(cuda::kIntegrated) == 1;
    std::size_t host_bytes = 0;
    bool any_mapped = false, all_mapped = true;
    const auto is_inner = [&](const std::string& name) {
      if (std::find(manifest.outputs.begin(), manifest.outputs.end(), name) != manifest.outputs.end()) return false;
      return std::any_of(manifest.segments.begin(), manifest.segments.end(), [&](const Segment& segment) {
        return std::find(segment.outputs.begin(), segment.outputs.end(), name) != segment.outputs.end();
      });
    };
    std::vector<std::size_t> starts;
    for (const WorkspaceTensor* stored : part_.places()) {
      // What other segments read and write stays in the GPU's memory, which it caches.
      const bool mapped = zero_copy && stored->bytes > 0 && !is_inner(stored->tensor);
      any_mapped = any_mapped || mapped;
      all_mapped = all_mapped && mapped;
      starts.push_back(host_bytes);
      borders_.push_back({stored, nullptr, 0, mapped});
      host_bytes += (static_cast<std::size_t>(stored->bytes) + kHostAlignment - 1) / kHostAlignment * kHostAlignment;
    }
    const Int workspace_bytes = all_mapped && part_.borders_at ? *part_.borders_at : part_.workspace_bytes;
    const auto size = static_cast<std::size_t>(workspace_bytes);
    driver_.check(driver_.allocate(&workspace_, std::max<std::size_t>(size, 1)), "cuMemAlloc");
    if (size > 0) driver_.check(driver_.fill(workspace_, 0, size), "cuMemsetD8");
    driver_.check(driver_.synchronize(nullptr), "cuStreamSynchronize");
    driver_.check(driver_.allocate_host(&host_, std::max<std::size_t>(host_bytes, 1),
                                        any_mapped ? cuda::kHostAllocMapped : 0),
                  "cuMemHostAlloc");
    Address mapped_base = 0;
    if (any_mapped)
      driver_.check(driver_.mapped_address(&mapped_base, host_, 0), "cuMemHostGetDevicePointer");
    for (std::size_t i = 0; i < borders_.size(); ++i) {
      borders_[i].host = static_cast<char*>(host_) + starts[i];
      borders_[i].address = borders_[i].mapped ? mapped_base + starts[i]
                                               : workspace_ + static_cast<Address>(borders_[i].stored->offset);
    }
  }

  void close() {
    for (const auto& row : graphs_) driver_.destroy_executable(row.second);
    graphs_.clear();
    if (stream_ != nullptr) driver_.destroy_stream(stream_);
    if (workspace_ != 0) driver_.free(workspace_);
    if (host_ != nullptr) driver_.free_host(host_);
    program_.reset();
    driver_.release_context(0);
  }

  std::vector<std::int64_t> shape_at(const Border& border, const std::vector<Int>& point) const {
    std::vector<std::int64_t> shape;
    if (border.stored->shape) {
      for (const Amount& size : *border.stored->shape) shape.push_back(static_cast<std::int64_t>(evaluate(size, point)));
    } else {
      for (const Dim& dim : engine_.facts().tensor(border.stored->tensor).shape)
        shape.push_back(static_cast<std::int64_t>(std::get<Int>(dim)));
    }
    return shape;
  }

  std::size_t bytes_at(const Border& border, const std::vector<Int>& point) const {
    const TensorInfo& tensor = engine_.facts().tensor(border.stored->tensor);
    auto bytes = static_cast<std::size_t>(kDtypes[dtype_named(tensor.dtype)].bytes);
    for (const std::int64_t size : shape_at(border, point)) bytes *= static_cast<std::size_t>(size);
    return bytes;
  }

  // Formulas may break a rule between the sizes that were looked at when the engine was opened.
  void check_point(const std::vector<Int>& point) {
    try {
      if (!point.empty()) check_kernels_at(part_, engine_.facts(), point, where_);
      checked_ = point;
    } catch (const EngineError& error) {
      refuse_session(where_, " cannot run at these sizes: ", error.what());
    }
  }

  Handle graph_at(const std::vector<Int>& point) {
    const auto known = std::find_if(graphs_.begin(), graphs_.end(), [&](const auto& row) { return row.first == point; });
    if (known != graphs_.end()) {
      graphs_.splice(graphs_.end(), graphs_, known);
      return graphs_.back().second;
    }
    check_point(point);
    load_kernels();  // old drivers cannot load while a graph is captured
    Handle graph = nullptr, executable = nullptr;
    driver_.check(driver_.begin_capture(stream_, cuda::kCaptureRelaxed), "cuStreamBeginCapture");
    try {
      const std::size_t inputs = part_.inputs.size();
      for (std::size_t i = 0; i < inputs; ++i)
        if (!borders_[i].mapped)
          driver_.check(driver_.upload(borders_[i].address, borders_[i].host, bytes_at(borders_[i], point), stream_),
                        "cuMemcpyHtoDAsync");
      launch_all(point, stream_);
      for (std::size_t i = inputs; i < borders_.size(); ++i)
        if (!borders_[i].mapped)
          driver_.check(driver_.download(borders_[i].host, borders_[i].address, bytes_at(borders_[i], point), stream_),
                        "cuMemcpyDtoHAsync");
    } catch (...) {
      if (driver_.end_capture(stream_, &graph) == 0 && graph != nullptr) driver_.destroy_graph(graph);
      throw;
    }
    driver_.check(driver_.end_capture(stream_, &graph), "cuStreamEndCapture");
    const int status = driver_.instantiate(&executable, graph, 0);
    driver_.destroy_graph(graph);
    driver_.check(status, "cuGraphInstantiate");
    graphs_.emplace_back(point, executable);
    if (graphs_.size() > kMaxGraphs) {
      driver_.destroy_executable(graphs_.front().second);
      graphs_.pop_front();
    }
    return executable;
  }

  void load_kernels() {
    for (const TunableOp& op : part_.works)
      for (const Launch& launch : op.tactics.front().launches) program_->function(static_cast<std::size_t>(launch.kernel));
  }

  // The first tactic of each operation: the cost model put it there.
  void launch_all(const std::vector<Int>& point, Handle stream) {
    for (const TunableOp& op : part_.works)
      for (const Launch& launch : op.tactics.front().launches) start(launch, point, stream);
  }

  void start(const Launch& launch, const std::vector<Int>& point, Handle stream) {
    const auto index = static_cast<std::size_t>(launch.kernel);
    const CompiledKernel& kernel = part_.kernels[index];
    std::vector<std::uint64_t> values(launch.arguments.size());
    std::vector<void*> addresses;
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = value_of(launch.arguments[i], point);
      addresses.push_back(&values[i]);
    }
    unsigned grid[3];
    for (int side = 0; side < 3; ++side) grid[side] = static_cast<unsigned>(evaluate(launch.grid[side], point));
    const auto threads = static_cast<unsigned>(kernel.threads), shared = static_cast<unsigned>(kernel.shared_bytes);
    const Handle function = program_->function(index);
    if (kernel.waits && driver_.launch_early != nullptr) {
      cuda::LaunchAttribute early = {cuda::kProgrammaticStreamSerialization, 0, 1, {}};
      const cuda::LaunchConfig config = {{grid[0], grid[1], grid[2]}, {threads, 1, 1}, shared, stream, &early, 1};
      driver_.check(driver_.launch_early(&config, function, addresses.data(), nullptr), "cuLaunchKernelEx");
      return;
    }
    driver_.check(driver_.launch(function, grid[0], grid[1], grid[2], threads, 1, 1, shared, stream,
                                 addresses.data(), nullptr),
                  "cuLaunchKernel");
  }

  // The bytes of a parameter, in the low end of 64 bits: every platform of CUDA is little endian.
  std::uint64_t value_of(const Argument& argument, const std::vector<Int>& point) const {
    if (argument.kind == Argument::Kind::null) return 0;
    const Int amount = evaluate(argument.amount, point);
    if (argument.kind == Argument::Kind::int32)
      return static_cast<std::uint32_t>(static_cast<std::int32_t>(amount));
    const auto offset = static_cast<Address>(amount);
    if (argument.kind == Argument::Kind::weights) return program_->weights + offset;
    for (const Border& border : borders_)
      if (border.mapped && border.stored->offset <= amount && amount < border.stored->offset + border.stored->bytes)
        return border.address + offset - static_cast<Address>(border.stored->offset);
    return workspace_ + offset;
  }

  const Driver& driver_;
  Engine& engine_;
  const Cuda& part_;
  std::string where_;
  Handle context_ = nullptr, stream_ = nullptr;
  std::shared_ptr<Program> program_;
  Address workspace_ = 0;
  void* host_ = nullptr;
  std::vector<Int> checked_;  // the sizes that were checked last
  std::vector<Border> borders_;  // inputs, then outputs
  std::list<std::pair<std::vector<Int>, Handle>> graphs_;  // the one used last at the end
};

}  // namespace

std::unique_ptr<Executor> load_cuda(Engine& engine, const Segment& segment, const Cuda& part) {
  const int sm = Driver::get().sm();
  if (part.sm != sm)
    refuse_session("its kernels are for sm_", part.sm, ", this GPU is sm_", sm, "; build for this device");
  return std::make_unique<CudaExecutor>(engine, segment, part);
}

}  // namespace tandem::internal
