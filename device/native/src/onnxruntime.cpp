// Portable segments by onnxruntime's C API, which is loaded when the first one is opened.
//
// onnxruntime promises that the order of its table of functions never changes ("Rules on how to add a
// new Ort API version" in onnxruntime_c_api.cc), so the places of those that are called stand here and
// its header is not needed.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>

#include "executor.hpp"

namespace tandem::internal {
namespace {

using Handle = void*;
using Status = void*;

constexpr unsigned kApiVersion = 17;  // the last one with a function that is called here
constexpr int kOldestMinor = 23;      // older ones let a model name files outside the engine
constexpr int kFatal = 4;
constexpr int kDefaultAllocator = 0;  // OrtDeviceAllocator: no arena
constexpr int kDefaultMemory = 0;

// ONNXTensorElementDataType of each row of kDtypes.
constexpr int kElementTypes[] = {9, 3, 2, 5, 4, 10, 6, 12, 1, 7, 13, 11};

enum Place {
  kGetErrorMessage = 2,
  kCreateEnv = 3,
  kCreateSessionFromArray = 8,
  kRun = 9,
  kCreateSessionOptions = 10,
  kSetIntraOpNumThreads = 24,
  kSessionGetInputCount = 30,
  kSessionGetOutputCount = 31,
  kSessionGetInputTypeInfo = 33,
  kSessionGetOutputTypeInfo = 34,
  kSessionGetInputName = 36,
  kSessionGetOutputName = 37,
  kCreateTensorWithDataAsOrtValue = 49,
  kGetTensorMutableData = 51,
  kCastTypeInfoToTensorInfo = 55,
  kGetTensorElementType = 60,
  kGetDimensionsCount = 61,
  kGetDimensions = 62,
  kGetTensorTypeAndShape = 65,
  kCreateCpuMemoryInfo = 69,
  kAllocatorFree = 76,
  kGetAllocatorWithDefaultOptions = 78,
  kReleaseStatus = 93,
  kReleaseSession = 95,
  kReleaseValue = 96,
  kReleaseTypeInfo = 98,
  kReleaseTensorTypeAndShapeInfo = 99,
  kReleaseSessionOptions = 100,
  kAddSessionConfigEntry = 130,
  kAddExternalInitializers = 210,
  kSetDeterministicCompute = 273,
};

struct ApiBase {
  const void* const* (*get_api)(std::uint32_t);
  const char* (*version)();
};

// The loaded library; it stays loaded, as onnxruntime's threads may outlive a session.
class Runtime {
 public:
  explicit Runtime(const std::string& library) {
    Handle handle = ::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr)
      refuse_session("onnxruntime cannot be loaded: ", ::dlerror(), " (tandem_session_options.onnxruntime is its path)");
    const auto get_base = reinterpret_cast<const ApiBase* (*)()>(::dlsym(handle, "OrtGetApiBase"));
    if (get_base == nullptr) refuse_session(library, " is not onnxruntime: it has no OrtGetApiBase");
    version_ = get_base()->version();
    int major = 0, minor = 0;
    std::sscanf(version_.c_str(), "%d.%d", &major, &minor);
    if (major == 1 && minor >= kOldestMinor) table_ = get_base()->get_api(kApiVersion);
    if (table_ == nullptr)
      refuse_session("onnxruntime ", version_, " does not do; needed is 1.", kOldestMinor, " or a later 1.x");
    call(kCreateEnv, kFatal, "tandem", &environment_);
    call(kCreateCpuMemoryInfo, kDefaultAllocator, kDefaultMemory, &memory_);
    call(kGetAllocatorWithDefaultOptions, &allocator_);
  }

  template <typename... Arguments>
  void call(Place place, Arguments... arguments) const {
    const Status status = function<Status(Arguments...)>(place)(arguments...);
    if (status == nullptr) return;
    std::string message = function<const char*(Status)>(kGetErrorMessage)(status);
    function<void(Status)>(kReleaseStatus)(status);
    throw SessionError(message.substr(0, message.find('\n')));
  }

  void release(Place place, Handle handle) const {
    if (handle != nullptr) function<void(Handle)>(place)(handle);
  }

  // Releases the handle at the end of a block.
  std::shared_ptr<void> owned(Place place, Handle handle) const {
    return {handle, [this, place](Handle one) { release(place, one); }};
  }

  // A tensor that looks at the view's data.
  Handle value_of(int dtype, const std::vector<std::int64_t>& shape, void* data, std::size_t bytes) const {
    static char nothing[64];
    Handle value = nullptr;
    call(kCreateTensorWithDataAsOrtValue, memory_, data == nullptr ? static_cast<void*>(nothing) : data, bytes,
         shape.data(), shape.size(), kElementTypes[dtype], &value);
    return value;
  }

  std::string name_at(Place place, Handle session, std::size_t index) const {
    char* text = nullptr;
    call(place, session, index, allocator_, &text);
    std::string name = text;
    call(kAllocatorFree, allocator_, static_cast<void*>(text));
    return name;
  }

  const std::string& version() const { return version_; }
  Handle environment() const { return environment_; }

 private:
  template <typename Signature>
  Signature* function(Place place) const {
    return reinterpret_cast<Signature*>(const_cast<void*>(table_[place]));
  }

  const void* const* table_ = nullptr;
  std::string version_;
  Handle environment_ = nullptr, memory_ = nullptr, allocator_ = nullptr;
};

const Runtime& runtime_of(const std::string& library) {
  static std::mutex mutex;
  static auto& runtimes = *new std::map<std::string, std::unique_ptr<Runtime>>;
  const std::lock_guard lock(mutex);
  std::unique_ptr<Runtime>& runtime = runtimes[library];
  if (!runtime) runtime = std::make_unique<Runtime>(library);
  return *runtime;
}

// Whether the CPU's fast INT8 products saturate at 16 bits: so they do on x86 without VNNI.
bool int8_products_saturate() {
#if defined(__x86_64__)
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("flags", 0) != 0) continue;
    std::istringstream words(line);
    for (std::string word; words >> word;)
      if (word == "avx512_vnni" || word == "avx_vnni") return false;
    return true;
  }
  return true;
#else
  return false;
#endif
}

class PortableExecutor final : public Executor {
 public:
  PortableExecutor(Engine& engine, const Segment& segment, const Portable& part, const SessionOptions& options)
      : runtime_(runtime_of(options.onnxruntime.empty() ? "libonnxruntime.so.1" : options.onnxruntime)),
        where_(engine.path() + ": segment " + quoted(segment.name)),
        segment_(segment) {
    try {
      open(engine, part, options);
      check("input", segment.inputs, kSessionGetInputCount, kSessionGetInputName, kSessionGetInputTypeInfo, engine);
      check("output", segment.outputs, kSessionGetOutputCount, kSessionGetOutputName, kSessionGetOutputTypeInfo,
            engine);
    } catch (const SessionError& error) {
      close();
      refuse_session(where_, " cannot be loaded by onnxruntime: ", error.what());
    } catch (...) {
      close();
      throw;
    }
  }

  ~PortableExecutor() override { close(); }
  PortableExecutor(const PortableExecutor&) = delete;
  PortableExecutor& operator=(const PortableExecutor&) = delete;

  void run(const std::vector<View>& inputs, std::vector<View>& outputs, const std::vector<Int>&) override {
    release(results_);
    std::vector<Handle> feeds;
    results_.assign(outputs.size(), nullptr);
    try {
      for (const View& view : inputs) feeds.push_back(value_of(view));
      for (std::size_t i = 0; i < outputs.size(); ++i)
        if (outputs[i].data != nullptr) results_[i] = value_of(outputs[i]);
      const std::vector<const char*> input_names = names_of(segment_.inputs), output_names = names_of(segment_.outputs);
      runtime_.call(kRun, session_, static_cast<Handle>(nullptr), input_names.data(),
                    static_cast<const Handle*>(feeds.data()), feeds.size(), output_names.data(), output_names.size(),
                    results_.data());
      for (std::size_t i = 0; i < outputs.size(); ++i)
        if (outputs[i].data == nullptr) read(results_[i], outputs[i]);
    } catch (const SessionError& error) {
      release(feeds);
      refuse_session(where_, " failed in onnxruntime: ", error.what());
    }
    release(feeds);
  }

  std::string description() const override { return "onnxruntime " + runtime_.version() + ", CPU"; }

 private:
  static std::vector<const char*> names_of(const std::vector<std::string>& names) {
    std::vector<const char*> texts;
    for (const std::string& name : names) texts.push_back(name.c_str());
    return texts;
  }

  Handle value_of(const View& view) const {
    auto bytes = static_cast<std::size_t>(kDtypes[view.dtype].bytes);
    for (const std::int64_t size : view.shape) bytes *= static_cast<std::size_t>(size);
    return runtime_.value_of(view.dtype, view.shape, view.data, bytes);
  }

  void release(std::vector<Handle>& values) const {
    for (const Handle value : values) runtime_.release(kReleaseValue, value);
    values.clear();
  }

  void close() {
    release(results_);
    runtime_.release(kReleaseSession, session_);
    session_ = nullptr;
    release(weights_);
  }

  void read(Handle value, View& view) const {
    Handle info = nullptr;
    runtime_.call(kGetTensorTypeAndShape, value, &info);
    const auto owner = runtime_.owned(kReleaseTensorTypeAndShapeInfo, info);
    std::size_t rank = 0;
    runtime_.call(kGetDimensionsCount, info, &rank);
    view.shape.resize(rank);
    runtime_.call(kGetDimensions, info, view.shape.data(), rank);
    runtime_.call(kGetTensorMutableData, value, &view.data);
  }

  void open(Engine& engine, const Portable& part, const SessionOptions& options) {
    std::vector<const char*> names;
    for (const std::string& name : part.weights) {
      const std::string_view bytes = engine.section(name);
      const Entry& entry = *engine.container().find(name);
      names.push_back(name.c_str());
      weights_.push_back(
          runtime_.value_of(entry.dtype, entry.shape, const_cast<char*>(bytes.data()), bytes.size()));
    }
    const std::string_view model = engine.section(part.model);
    const bool exact = int8_products_saturate();
    try {
      start(engine, model, names, options, exact, false);
    } catch (const SessionError&) {
      // Its exact products fail where nodes share weights: there nodes between Q/DQ run in float.
      if (!exact) throw;
      start(engine, model, names, options, exact, true);
    }
  }

  void start(const Engine& engine, std::string_view model, const std::vector<const char*>& names,
             const SessionOptions& options, bool exact_products, bool float_products) {
    Handle settings = nullptr;
    runtime_.call(kCreateSessionOptions, &settings);
    const auto owner = runtime_.owned(kReleaseSessionOptions, settings);
    const auto set = [&](const char* key, const char* value) {
      runtime_.call(kAddSessionConfigEntry, settings, key, value);
    };
    runtime_.call(kSetDeterministicCompute, settings, true);
    runtime_.call(kSetIntraOpNumThreads, settings, options.threads);
    // Waiting threads sleep: between two frames the board has better things to do than spin.
    set("session.intra_op.allow_spinning", "0");
    set("session.inter_op.allow_spinning", "0");
    // No path can lie below a file, so no file with weights that a model names is ever read.
    set("session.model_external_initializers_file_folder_path", engine.path().c_str());
    // It drops the lower bound of a Clip before Q where the scale is below about 1e-7.
    set("optimization.disable_specified_optimizers", "ClipQuantRewrite");
    if (exact_products) set("session.x64quantprecision", "1");
    if (float_products) set("session.disable_quant_qdq", "1");
    if (!names.empty())
      runtime_.call(kAddExternalInitializers, settings, names.data(), static_cast<const Handle*>(weights_.data()),
                    names.size());
    runtime_.call(kCreateSessionFromArray, runtime_.environment(), static_cast<const void*>(model.data()),
                  model.size(), settings, &session_);
  }

  // The arena relies on what the manifest says of the model's tensors.
  void check(const char* title, const std::vector<std::string>& names, Place count_of, Place name_of, Place type_of,
             const Engine& engine) {
    std::size_t count = 0;
    runtime_.call(count_of, session_, &count);
    if (count != names.size()) refuse_session("it has ", count, " ", title, "s, the segment ", names.size());
    std::map<std::string, int> types;
    for (std::size_t i = 0; i < count; ++i) {
      Handle info = nullptr;
      runtime_.call(type_of, session_, i, &info);
      const auto owner = runtime_.owned(kReleaseTypeInfo, info);
      Handle tensor = nullptr;
      int type = 0;
      runtime_.call(kCastTypeInfoToTensorInfo, info, &tensor);
      if (tensor != nullptr) runtime_.call(kGetTensorElementType, tensor, &type);
      types[runtime_.name_at(name_of, session_, i)] = type;
    }
    for (const std::string& name : names) {
      const int expected = kElementTypes[dtype_named(engine.facts().tensor(name).dtype)];
      const auto row = types.find(name);
      if (row == types.end() || row->second != expected)
        refuse_session("its ", title, " ", quoted(name), " is missing or of another type; build the engine again");
    }
  }

  const Runtime& runtime_;
  std::string where_;
  Segment segment_;
  Handle session_ = nullptr;
  std::vector<Handle> weights_;  // onnxruntime reads some of them in place for as long as it runs
  std::vector<Handle> results_;
};

}  // namespace

std::unique_ptr<Executor> load_portable(Engine& engine, const Segment& segment, const Portable& part,
                                        const SessionOptions& options) {
  return std::make_unique<PortableExecutor>(engine, segment, part, options);
}

}  // namespace tandem::internal
