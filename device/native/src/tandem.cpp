// The C interface: exceptions become statuses, and nothing of C++ crosses it.
#include "tandem.h"

#include <new>

#include "session.hpp"

namespace {

thread_local std::string last_error;

// A tensor of the manifest in the form of C.
struct Info {
  std::vector<std::int64_t> shape;
  std::vector<const char*> dims;
  const tandem::internal::TensorInfo* tensor;
};

std::vector<Info> infos_of(const tandem::internal::Engine& engine, const std::vector<std::string>& names) {
  std::vector<Info> rows;
  for (const std::string& name : names) {
    Info row{{}, {}, &engine.facts().tensor(name)};
    for (const tandem::internal::Dim& dim : row.tensor->shape) {
      const auto* size = std::get_if<tandem::internal::Int>(&dim);
      const auto* dynamic = std::get_if<std::string>(&dim);
      row.shape.push_back(size != nullptr ? static_cast<std::int64_t>(*size) : -1);
      row.dims.push_back(dynamic != nullptr ? dynamic->c_str() : nullptr);
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

template <typename Work>
tandem_status guarded(Work work) {
  try {
    return work();
  } catch (const tandem::internal::EngineError& error) {
    last_error = error.what();
    return TANDEM_ENGINE_ERROR;
  } catch (const tandem::internal::SessionError& error) {
    last_error = error.what();
    return TANDEM_SESSION_ERROR;
  } catch (const std::bad_alloc&) {
    last_error.clear();  // a longer text might need memory
    return TANDEM_MEMORY_ERROR;
  } catch (const std::length_error&) {
    last_error.clear();
    return TANDEM_MEMORY_ERROR;
  } catch (...) {
    last_error.clear();
    return TANDEM_INTERNAL_ERROR;
  }
}

tandem_status bad_argument(const std::string& message) {
  last_error = message;
  return TANDEM_ARGUMENT_ERROR;
}

tandem::internal::View view_of(const tandem_tensor& tensor) {
  if (static_cast<unsigned>(tensor.dtype) >= std::size(tandem::internal::kDtypes))
    tandem::internal::refuse_session("the array for ", tandem::internal::quoted(tensor.name), " has no dtype");
  return {static_cast<int>(tensor.dtype), {tensor.shape, tensor.shape + tensor.rank}, tensor.data};
}

// The arrays by name. Throws SessionError: one is incomplete, or named twice.
std::unordered_map<std::string, tandem::internal::View> views_of(const char* title, const tandem_tensor* tensors, size_t count) {
  std::unordered_map<std::string, tandem::internal::View> views;
  for (size_t i = 0; i < count; ++i) {
    if (tensors[i].name == nullptr || (tensors[i].shape == nullptr && tensors[i].rank > 0))
      tandem::internal::refuse_session(title, " ", i, " has no name or no shape");
    if (!views.emplace(tensors[i].name, view_of(tensors[i])).second)
      tandem::internal::refuse_session(title, " ", tandem::internal::quoted(tensors[i].name), " is given twice");
  }
  return views;
}

}  // namespace

struct tandem_engine {
  std::shared_ptr<tandem::internal::Engine> engine;
  std::vector<Info> inputs, outputs;
  std::string manifest;
};

struct tandem_session {
  std::unique_ptr<tandem::internal::Session> session;
};

namespace {

tandem_status info_at(const std::vector<Info>& rows, size_t index, tandem_tensor_info* info) {
  if (info == nullptr || index >= rows.size())
    return bad_argument("index " + std::to_string(index) + " of " + std::to_string(rows.size()) + " tensors");
  const Info& row = rows[index];
  *info = {row.tensor->name.c_str(),
           static_cast<tandem_dtype>(tandem::internal::dtype_named(row.tensor->dtype)),
           row.shape.size(),
           row.shape.data(),
           row.dims.data(),
           row.tensor->scale.value_or(0.0)};
  return TANDEM_OK;
}

}  // namespace

extern "C" {

const char* tandem_version(void) { return "1.0"; }
const char* tandem_last_error(void) { return last_error.empty() ? "out of memory" : last_error.c_str(); }

const char* tandem_dtype_name(tandem_dtype dtype) {
  return static_cast<unsigned>(dtype) < std::size(tandem::internal::kDtypes) ? tandem::internal::kDtypes[dtype].name : "unknown";
}

size_t tandem_dtype_bytes(tandem_dtype dtype) {
  return static_cast<unsigned>(dtype) < std::size(tandem::internal::kDtypes)
             ? static_cast<size_t>(tandem::internal::kDtypes[dtype].bytes)
             : 0;
}

tandem_status tandem_engine_open(const char* path, tandem_engine** engine) {
  if (path == nullptr || engine == nullptr) return bad_argument("tandem_engine_open needs a path and a place");
  return guarded([&] {
    auto opened = std::make_unique<tandem_engine>();
    opened->engine = std::make_shared<tandem::internal::Engine>(path);
    const tandem::internal::Manifest& manifest = opened->engine->manifest();
    opened->inputs = infos_of(*opened->engine, manifest.inputs);
    opened->outputs = infos_of(*opened->engine, manifest.outputs);
    *engine = opened.release();
    return TANDEM_OK;
  });
}

void tandem_engine_close(tandem_engine* engine) { delete engine; }

tandem_status tandem_engine_verify(tandem_engine* engine) {
  if (engine == nullptr) return bad_argument("there is no engine");
  return guarded([&] {
    engine->engine->verify();
    return TANDEM_OK;
  });
}

const char* tandem_engine_profile(const tandem_engine* engine) {
  return engine == nullptr ? "" : engine->engine->manifest().profile.c_str();
}
const char* tandem_engine_precision(const tandem_engine* engine) {
  return engine == nullptr ? "" : engine->engine->manifest().precision.c_str();
}
const char* tandem_engine_manifest(const tandem_engine* engine) {
  return engine == nullptr ? "" : engine->engine->container().manifest.c_str();
}
int tandem_engine_uncalibrated(const tandem_engine* engine) {
  return engine != nullptr && engine->engine->manifest().uncalibrated;
}
size_t tandem_engine_input_count(const tandem_engine* engine) { return engine == nullptr ? 0 : engine->inputs.size(); }
size_t tandem_engine_output_count(const tandem_engine* engine) { return engine == nullptr ? 0 : engine->outputs.size(); }
size_t tandem_engine_dim_count(const tandem_engine* engine) {
  return engine == nullptr ? 0 : engine->engine->manifest().dims.size();
}

tandem_status tandem_engine_input(const tandem_engine* engine, size_t index, tandem_tensor_info* info) {
  return guarded([&] { return engine == nullptr ? bad_argument("there is no engine") : info_at(engine->inputs, index, info); });
}

tandem_status tandem_engine_output(const tandem_engine* engine, size_t index, tandem_tensor_info* info) {
  return guarded([&] { return engine == nullptr ? bad_argument("there is no engine") : info_at(engine->outputs, index, info); });
}

tandem_status tandem_engine_dim(const tandem_engine* engine, size_t index, tandem_dim_info* info) {
  return guarded([&] {
    if (info == nullptr || index >= tandem_engine_dim_count(engine))
      return bad_argument("there is no dimension " + std::to_string(index));
    const tandem::internal::DimRange& dim = engine->engine->manifest().dims[index];
    *info = {dim.name.c_str(), static_cast<int64_t>(dim.min), static_cast<int64_t>(dim.opt),
             static_cast<int64_t>(dim.max), static_cast<int64_t>(dim.step)};
    return TANDEM_OK;
  });
}

tandem_status tandem_session_open(tandem_engine* engine, const tandem_session_options* options,
                                  tandem_session** session) {
  if (engine == nullptr || session == nullptr) return bad_argument("tandem_session_open needs an engine and a place");
  return guarded([&] {
    tandem::internal::SessionOptions chosen;
    if (options != nullptr) {
      chosen.profile = options->profile == nullptr ? "" : options->profile;
      chosen.onnxruntime = options->onnxruntime == nullptr ? "" : options->onnxruntime;
      chosen.threads = options->threads;
      chosen.portable = options->portable != 0;
    }
    auto opened = std::make_unique<tandem_session>();
    opened->session = std::make_unique<tandem::internal::Session>(engine->engine, chosen);
    *session = opened.release();
    return TANDEM_OK;
  });
}

void tandem_session_close(tandem_session* session) { delete session; }

size_t tandem_session_report_count(const tandem_session* session) {
  return session == nullptr ? 0 : session->session->reports().size();
}

tandem_status tandem_session_report(const tandem_session* session, size_t index, tandem_report* report) {
  return guarded([&] {
    if (report == nullptr || index >= tandem_session_report_count(session))
      return bad_argument("there is no segment " + std::to_string(index));
    const tandem::internal::Report& row = session->session->reports()[index];
    *report = {row.segment.c_str(), row.processor.c_str(), row.implementation.c_str(), row.reason.c_str()};
    return TANDEM_OK;
  });
}

tandem_status tandem_session_infer(tandem_session* session, const tandem_tensor* inputs, size_t input_count,
                                   const tandem_tensor* targets, size_t target_count) {
  if (session == nullptr || (inputs == nullptr && input_count > 0) || (targets == nullptr && target_count > 0))
    return bad_argument("tandem_session_infer needs a session and its arrays");
  return guarded([&] {
    session->session->infer(views_of("input", inputs, input_count), views_of("output", targets, target_count));
    return TANDEM_OK;
  });
}

tandem_status tandem_session_output(const tandem_session* session, size_t index, tandem_tensor* output) {
  return guarded([&] {
    if (session == nullptr || output == nullptr || index >= session->session->outputs().size())
      return bad_argument("there is no output " + std::to_string(index) + " of an inference");
    const tandem::internal::View& view = session->session->outputs()[index];
    *output = {session->session->engine().manifest().outputs[index].c_str(), static_cast<tandem_dtype>(view.dtype),
               view.shape.size(), view.shape.data(), view.data};
    return TANDEM_OK;
  });
}

tandem_status tandem_session_infer_on_stream(tandem_session* session, const tandem_tensor* inputs,
                                             size_t input_count, const tandem_tensor* targets, size_t target_count,
                                             void* stream) {
  if (session == nullptr || (inputs == nullptr && input_count > 0) || (targets == nullptr && target_count > 0))
    return bad_argument("tandem_session_infer_on_stream needs a session and its arrays");
  return guarded([&] {
    session->session->infer_on_stream(views_of("input", inputs, input_count),
                                      views_of("output", targets, target_count), stream);
    return TANDEM_OK;
  });
}

}  // extern "C"
