#include "session.hpp"

#include <sys/mman.h>

#include <algorithm>

namespace tandem::internal {
namespace {

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text;
  for (const std::int64_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "(" + text + ")";
}

std::string shape_text(const std::vector<Dim>& shape) {
  std::string text;
  for (const Dim& dim : shape) {
    if (!text.empty()) text += ", ";
    if (const auto* size = std::get_if<Int>(&dim))
      text += decimal(*size);
    else
      text += std::holds_alternative<std::string>(dim) ? std::get<std::string>(dim) : "?";
  }
  return "(" + text + ")";
}

std::size_t bytes_of(const View& view) {
  auto bytes = static_cast<std::size_t>(kDtypes[view.dtype].bytes);
  for (const std::int64_t size : view.shape) bytes *= static_cast<std::size_t>(size);
  return bytes;
}

std::size_t index_of(const Manifest& manifest, const std::string& dim) {
  const auto row = std::find_if(manifest.dims.begin(), manifest.dims.end(),
                                [&](const DimRange& range) { return range.name == dim; });
  return static_cast<std::size_t>(row - manifest.dims.begin());
}

// The sizes of a tensor; false where only a run tells one.
bool sizes_at(const TensorInfo& tensor, const Manifest& manifest, const std::vector<Int>& point,
              std::vector<std::int64_t>& shape) {
  for (const Dim& dim : tensor.shape) {
    if (std::holds_alternative<std::monostate>(dim)) return false;
    const auto* size = std::get_if<Int>(&dim);
    const Int value = size != nullptr ? *size : point[index_of(manifest, std::get<std::string>(dim))];
    shape.push_back(static_cast<std::int64_t>(value));
  }
  return true;
}

// What a segment gave has the sizes that the manifest promises: later ones rely on it.
void check_result(const TensorInfo& tensor, const Manifest& manifest, const std::vector<Int>& point, const View& view) {
  bool fits = view.shape.size() == tensor.shape.size();
  for (std::size_t axis = 0; fits && axis < tensor.shape.size(); ++axis) {
    const Dim& dim = tensor.shape[axis];
    if (const auto* size = std::get_if<Int>(&dim)) fits = view.shape[axis] == *size;
    if (const auto* name = std::get_if<std::string>(&dim)) fits = view.shape[axis] == point[index_of(manifest, *name)];
  }
  if (!fits)
    refuse_session("tensor ", quoted(tensor.name), " came with the shape ", shape_text(view.shape),
                   ", the engine says ", shape_text(tensor.shape), "; build the engine again");
}

void check_view(const TensorInfo& tensor, const View& view, const std::string& where) {
  if (view.dtype != dtype_named(tensor.dtype))
    refuse_session(where, " is of ", view.dtype < 0 ? "an unknown dtype" : kDtypes[view.dtype].name,
                   "; give ", tensor.dtype);
  if (view.shape.size() != tensor.shape.size())
    refuse_session(where, " has the shape ", shape_text(view.shape), "; give ", shape_text(tensor.shape));
}

}  // namespace

std::uint64_t Executor::address(std::size_t) const { refuse_session("it runs on ", description(), ", not on the GPU"); }
std::vector<std::int64_t> Executor::shape(std::size_t, const std::vector<Int>&) {
  address(0);
  return {};
}
void Executor::enqueue(const std::vector<Int>&, void*) { address(0); }

Session::Session(std::shared_ptr<Engine> engine, const SessionOptions& options) : engine_(std::move(engine)) {
  const Manifest& manifest = engine_->manifest();
  if (!options.profile.empty() && options.profile != manifest.profile)
    refuse_session("engine ", engine_->path(), " is for ", manifest.profile, ", this device is ",
                   options.profile, "; build one for it");
  if (options.threads < 0) refuse_session("the session was given ", options.threads, " threads; give 0 or more");
  for (const Segment& segment : manifest.segments) load(segment, options);
  if (manifest.arena_bytes == 0) return;
  void* arena = ::mmap(nullptr, static_cast<std::size_t>(manifest.arena_bytes), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (arena == MAP_FAILED)
    refuse_session(engine_->path(), " needs ", manifest.arena_bytes,
                   " bytes for its tensors, which the system does not give; build for a smaller batch");
  arena_ = static_cast<char*>(arena);
}

Session::~Session() {
  if (fence_ != nullptr) {
    try {
      const cuda::CurrentContext current(cuda::Driver::get());
      fence_->wait();
      fence_.reset();
    } catch (const SessionError&) {  // after a fault on the GPU every call fails
    }
  }
  if (arena_ != nullptr) ::munmap(arena_, static_cast<std::size_t>(engine_->manifest().arena_bytes));
}

void Session::load(const Segment& segment, const SessionOptions& options) {
  std::string reasons;
  for (const Implementation& implementation : segment.implementations) {
    std::unique_ptr<Executor> executor;
    const std::string kind = kind_of(implementation);
    try {
      if (const auto* portable = std::get_if<Portable>(&implementation))
        executor = load_portable(*engine_, segment, *portable, options);
      else if (const auto* cuda = std::get_if<Cuda>(&implementation); cuda != nullptr && !options.portable)
        executor = load_cuda(*engine_, segment, *cuda);
      else if (const auto* plan = std::get_if<TensorRT>(&implementation); plan != nullptr && !options.portable)
        executor = load_tensorrt(*engine_, segment, *plan);
      else
        refuse_session(options.portable && kind != "tensorrt_gpu" ? "the session is portable"
                                                                  : "not run by this library");
    } catch (const SessionError& error) {
      reasons += (reasons.empty() ? "" : "; ") + kind + ": " + error.what();
      continue;
    }
    reasons += (reasons.empty() ? "" : "; ") + executor->description();
    reports_.push_back({segment.name, segment.processor, kind, reasons});
    executors_.push_back(std::move(executor));
    return;
  }
  refuse_session(engine_->path(), ": segment ", quoted(segment.name), " cannot run here: ", reasons);
}

// Throws SessionError, which names them, if inputs are missing or unknown.
void Session::check_names(const Views& inputs) const {
  const std::vector<std::string>& names = engine_->manifest().inputs;
  std::vector<std::string> missing, unknown;
  for (const std::string& name : names)
    if (inputs.count(name) == 0) missing.push_back(name);
  for (const auto& [name, view] : inputs)
    if (std::find(names.begin(), names.end(), name) == names.end()) unknown.push_back(name);
  std::sort(unknown.begin(), unknown.end());
  std::string problems = missing.empty() ? "" : " lacks " + quoted(missing);
  if (!unknown.empty()) problems += (problems.empty() ? " does not take " : " and does not take ") + quoted(unknown);
  if (!problems.empty()) refuse_session("the input", problems, "; give ", quoted(names));
}

std::vector<Int> Session::check_inputs(const Views& inputs) const {
  check_names(inputs);
  const Manifest& manifest = engine_->manifest();
  std::vector<Int> point(manifest.dims.size(), -1);
  for (const std::string& name : manifest.inputs) {
    const std::string where = "input " + quoted(name);
    const View& view = inputs.at(name);
    const TensorInfo& tensor = engine_->facts().tensor(name);
    check_view(tensor, view, where);
    for (std::size_t axis = 0; axis < tensor.shape.size(); ++axis) {
      const Int size = view.shape[axis];
      const std::string at = where + " has the size " + decimal(size) + " in dimension " + std::to_string(axis);
      if (const auto* fixed = std::get_if<Int>(&tensor.shape[axis])) {
        if (size != *fixed) refuse_session(at, ", the engine takes ", *fixed);
        continue;
      }
      const auto& dim = std::get<std::string>(tensor.shape[axis]);
      const std::size_t index = index_of(manifest, dim);
      const DimRange& range = manifest.dims[index];
      if (size < range.min || size > range.max || size % range.step != 0)
        refuse_session(at, " (", quoted(dim), "), the engine takes ", range.min, " to ", range.max,
                       " in steps of ", range.step);
      if (point[index] >= 0 && point[index] != size)
        refuse_session(at, " (", quoted(dim), "), another input has ", point[index], " there");
      point[index] = size;
    }
    if (view.data == nullptr && bytes_of(view) > 0) refuse_session(where, " has no data");
  }
  return point;
}

void Session::check_targets(const Views& targets) const {
  const std::vector<std::string>& names = engine_->manifest().outputs;
  for (const auto& [name, view] : targets) {
    if (std::find(names.begin(), names.end(), name) == names.end())
      refuse_session("there is no output ", quoted(name), " to write into an array; there are ", quoted(names));
    const std::string where = "the array for output " + quoted(name);
    check_view(engine_->facts().tensor(name), view, where);
    if (view.data == nullptr && bytes_of(view) > 0) refuse_session(where, " has no data");
  }
}

View Session::output_view(const TensorInfo& tensor, const std::vector<Int>& point, const Views& targets) {
  const Manifest& manifest = engine_->manifest();
  View view{dtype_named(tensor.dtype), {}, nullptr};
  const bool known = sizes_at(tensor, manifest, point, view.shape);
  if (const auto target = targets.find(tensor.name); target != targets.end()) {
    if (known && target->second.shape != view.shape)
      refuse_session("the array for output ", quoted(tensor.name), " has the shape ",
                     shape_text(target->second.shape), "; give ", shape_text(view.shape));
    return target->second;
  }
  if (!known) return {view.dtype, {}, nullptr};
  if (std::find(manifest.outputs.begin(), manifest.outputs.end(), tensor.name) != manifest.outputs.end()) {
    std::vector<char>& memory = owned_[tensor.name];
    memory.resize(std::max<std::size_t>(bytes_of(view), 1));
    view.data = memory.data();
    return view;
  }
  for (const Buffer& buffer : manifest.buffers)
    if (buffer.tensor == tensor.name) view.data = arena_ + static_cast<std::size_t>(buffer.offset);
  return view.data == nullptr ? View{view.dtype, {}, nullptr} : view;
}

void Session::infer(const Views& inputs, const Views& targets) {
  const std::lock_guard lock(mutex_);
  const Manifest& manifest = engine_->manifest();
  const std::vector<Int> point = check_inputs(inputs);
  check_targets(targets);
  outputs_.clear();
  if (fence_ != nullptr) {
    const cuda::CurrentContext current(cuda::Driver::get());
    fence_->wait();
  }
  Views values = inputs;
  for (std::size_t i = 0; i < manifest.segments.size(); ++i) {
    const Segment& segment = manifest.segments[i];
    std::vector<View> reads, writes;
    for (const std::string& name : segment.inputs) reads.push_back(values.at(name));
    for (const std::string& name : segment.outputs)
      writes.push_back(output_view(engine_->facts().tensor(name), point, targets));
    executors_[i]->run(reads, writes, point);
    for (std::size_t output = 0; output < writes.size(); ++output) {
      const std::string& name = segment.outputs[output];
      check_result(engine_->facts().tensor(name), manifest, point, writes[output]);
      values[name] = writes[output];
    }
  }
  for (const std::string& name : manifest.outputs) outputs_.push_back(values.at(name));
}

void Session::infer_on_stream(const Views& inputs, const Views& targets, void* stream) {
  const std::lock_guard lock(mutex_);
  const Manifest& manifest = engine_->manifest();
  const std::vector<Int> point = check_inputs(inputs);
  check_targets(targets);
  for (const std::string& name : manifest.outputs)
    if (!targets.count(name)) refuse_session("output ", quoted(name), " has no array");
  // Nothing is enqueued before all of it was checked.
  for (std::size_t i = 0; i < manifest.segments.size(); ++i) {
    const Segment& segment = manifest.segments[i];
    executors_[i]->shape(0, point);
    for (std::size_t output = 0; output < segment.outputs.size(); ++output) {
      const auto target = targets.find(segment.outputs[output]);
      if (target == targets.end()) continue;
      const auto shape = executors_[i]->shape(segment.inputs.size() + output, point);
      if (target->second.shape != shape)
        refuse_session("the array for output ", quoted(target->first), " has the shape ",
                       shape_text(target->second.shape), "; give ", shape_text(shape));
    }
  }
  if (fence_ == nullptr) fence_ = std::make_unique<cuda::Fence>();
  fence_->precede(stream);
  try {
    enqueue(inputs, targets, point, stream);
  } catch (const SessionError&) {
    fence_->record(stream);  // a part of it may be enqueued
    throw;
  }
  fence_->record(stream);
}

void Session::enqueue(const Views& inputs, const Views& targets, const std::vector<Int>& point, void* stream) {
  const Manifest& manifest = engine_->manifest();
  const cuda::Driver& driver = cuda::Driver::get();
  const auto copy = [&](std::uint64_t target, std::uint64_t source, const std::string& name,
                        std::vector<std::int64_t> shape) {
    const View view{dtype_named(engine_->facts().tensor(name).dtype), std::move(shape), nullptr};
    const std::size_t bytes = bytes_of(view);
    if (bytes > 0) driver.check(driver.copy(target, source, bytes, stream), "cuMemcpyDtoDAsync");
  };
  std::unordered_map<std::string, std::uint64_t> addresses;
  for (const auto& [name, view] : inputs) addresses[name] = reinterpret_cast<std::uint64_t>(view.data);
  for (std::size_t i = 0; i < manifest.segments.size(); ++i) {
    const Segment& segment = manifest.segments[i];
    Executor& executor = *executors_[i];
    for (std::size_t input = 0; input < segment.inputs.size(); ++input) {
      const std::string& name = segment.inputs[input];
      copy(executor.address(input), addresses.at(name), name, executor.shape(input, point));
    }
    executor.enqueue(point, stream);
    for (std::size_t output = 0; output < segment.outputs.size(); ++output) {
      const std::string& name = segment.outputs[output];
      const std::size_t border = segment.inputs.size() + output;
      addresses[name] = executor.address(border);
      if (const auto target = targets.find(name); target != targets.end())
        copy(reinterpret_cast<std::uint64_t>(target->second.data), executor.address(border), name,
             executor.shape(border, point));
    }
  }
}

}  // namespace tandem::internal
