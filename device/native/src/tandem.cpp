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
  const tandem::TensorInfo* tensor;
};

std::vector<Info> infos_of(const tandem::Engine& engine, const std::vector<std::string>& names) {
  std::vector<Info> rows;
  for (const std::string& name : names) {
    Info row{{}, {}, &engine.facts().tensor(name)};
    for (const tandem::Dim& dim : row.tensor->shape) {
      const auto* size = std::get_if<tandem::Int>(&dim);
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
  } catch (const tandem::EngineError& error) {
    last_error = error.what();
    return TANDEM_ENGINE_ERROR;
  } catch (const tandem::SessionError& error) {
    last_error = error.what();
    return TANDEM_SESSION_ERROR;
  } catch (const std::bad_alloc&) {
    last_error = "there is no memory";
    return TANDEM_MEMORY_ERROR;
  } catch (const std::length_error&) {
    last_error = "there is no memory";
    return TANDEM_MEMORY_ERROR;
  }
}

tandem_status bad_argument(const std::string& message) {
  last_error = message;
  return TANDEM_ARGUMENT_ERROR;
}

tandem::View view_of(const tandem_tensor& tensor) {
  return {static_cast<int>(tensor.dtype), {tensor.shape, tensor.shape + tensor.rank}, tensor.data};
}

// The arrays by name. Throws SessionError: one is incomplete, or named twice.
std::unordered_map<std::string, tandem::View> views_of(const char* title, const tandem_tensor* tensors, size_t count) {
  std::unordered_map<std::string, tandem::View> views;
  for (size_t i = 0; i < count; ++i) {
    if (tensors[i].name == nullptr || (tensors[i].shape == nullptr && tensors[i].rank > 0))
      tandem::refuse_session(title, " ", i, " has no name or no shape");
    if (!views.emplace(tensors[i].name, view_of(tensors[i])).second)
      tandem::refuse_session(title, " ", tandem::quoted(tensors[i].name), " is given twice");
  }
  return views;
}

}  // namespace

struct tandem_engine {
  std::shared_ptr<tandem::Engine> engine;
  std::vector<Info> inputs, outputs;
  std::string manifest;
};

struct tandem_session {
  std::unique_ptr<tandem::Session> session;
  std::unordered_map<std::string, tandem::View> results;  // of the last inference: their shapes
};

namespace {

tandem_status info_at(const std::vector<Info>& rows, size_t index, tandem_tensor_info* info) {
  if (info == nullptr || index >= rows.size())
    return bad_argument("index " + std::to_string(index) + " of " + std::to_string(rows.size()) + " tensors");
  const Info& row = rows[index];
  *info = {row.tensor->name.c_str(),
           static_cast<tandem_dtype>(tandem::dtype_named(row.tensor->dtype)),
           row.shape.size(),
           row.shape.data(),
           row.dims.data(),
           row.tensor->scale.value_or(0.0)};
  return TANDEM_OK;
}

}  // namespace

extern "C" {

const char* tandem_version(void) { return "1.0"; }
const char* tandem_last_error(void) { return last_error.c_str(); }

const char* tandem_dtype_name(tandem_dtype dtype) {
  return static_cast<unsigned>(dtype) < std::size(tandem::kDtypes) ? tandem::kDtypes[dtype].name : "unknown";
}

size_t tandem_dtype_bytes(tandem_dtype dtype) {
  return static_cast<unsigned>(dtype) < std::size(tandem::kDtypes)
             ? static_cast<size_t>(tandem::kDtypes[dtype].bytes)
             : 0;
}

tandem_status tandem_engine_open(const char* path, tandem_engine** engine) {
  if (path == nullptr || engine == nullptr) return bad_argument("tandem_engine_open needs a path and a place");
  return guarded([&] {
    auto opened = std::make_unique<tandem_engine>();
    opened->engine = std::make_shared<tandem::Engine>(path);
    const tandem::Manifest& manifest = opened->engine->manifest();
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

const char* tandem_engine_profile(const tandem_engine* engine) { return engine->engine->manifest().profile.c_str(); }
const char* tandem_engine_precision(const tandem_engine* engine) {
  return engine->engine->manifest().precision.c_str();
}
const char* tandem_engine_manifest(const tandem_engine* engine) { return engine->engine->container().manifest.c_str(); }
size_t tandem_engine_input_count(const tandem_engine* engine) { return engine->inputs.size(); }
size_t tandem_engine_output_count(const tandem_engine* engine) { return engine->outputs.size(); }
size_t tandem_engine_dim_count(const tandem_engine* engine) { return engine->engine->manifest().dims.size(); }

tandem_status tandem_engine_input(const tandem_engine* engine, size_t index, tandem_tensor_info* info) {
  return info_at(engine->inputs, index, info);
}

tandem_status tandem_engine_output(const tandem_engine* engine, size_t index, tandem_tensor_info* info) {
  return info_at(engine->outputs, index, info);
}

tandem_status tandem_engine_dim(const tandem_engine* engine, size_t index, tandem_dim_info* info) {
  const auto& dims = engine->engine->manifest().dims;
  if (info == nullptr || index >= dims.size())
    return bad_argument("index " + std::to_string(index) + " of " + std::to_string(dims.size()) + " dimensions");
  const tandem::DimRange& dim = dims[index];
  *info = {dim.name.c_str(), static_cast<int64_t>(dim.min), static_cast<int64_t>(dim.opt),
           static_cast<int64_t>(dim.max), static_cast<int64_t>(dim.step)};
  return TANDEM_OK;
}

tandem_status tandem_session_open(tandem_engine* engine, const tandem_session_options* options,
                                  tandem_session** session) {
  if (engine == nullptr || session == nullptr) return bad_argument("tandem_session_open needs an engine and a place");
  return guarded([&] {
    tandem::SessionOptions chosen;
    if (options != nullptr) {
      chosen.profile = options->profile == nullptr ? "" : options->profile;
      chosen.onnxruntime = options->onnxruntime == nullptr ? "" : options->onnxruntime;
      chosen.threads = options->threads;
      chosen.portable = options->portable != 0;
    }
    auto opened = std::make_unique<tandem_session>();
    opened->session = std::make_unique<tandem::Session>(engine->engine, chosen);
    *session = opened.release();
    return TANDEM_OK;
  });
}

void tandem_session_close(tandem_session* session) { delete session; }

size_t tandem_session_report_count(const tandem_session* session) { return session->session->reports().size(); }

tandem_status tandem_session_report(const tandem_session* session, size_t index, tandem_report* report) {
  const auto& reports = session->session->reports();
  if (report == nullptr || index >= reports.size())
    return bad_argument("index " + std::to_string(index) + " of " + std::to_string(reports.size()) + " segments");
  const tandem::Report& row = reports[index];
  *report = {row.segment.c_str(), row.processor.c_str(), row.implementation.c_str(), row.reason.c_str()};
  return TANDEM_OK;
}

tandem_status tandem_session_infer(tandem_session* session, const tandem_tensor* inputs, size_t input_count,
                                   tandem_tensor* outputs, size_t output_count) {
  if (session == nullptr || (inputs == nullptr && input_count > 0) || (outputs == nullptr && output_count > 0))
    return bad_argument("tandem_session_infer needs a session and its arrays");
  return guarded([&]() -> tandem_status {
    const auto feeds = views_of("input", inputs, input_count);
    session->results.clear();
    for (size_t i = 0; i < output_count; ++i) {
      if (outputs[i].name == nullptr || (outputs[i].shape == nullptr && outputs[i].data != nullptr && outputs[i].rank > 0))
        return bad_argument("output " + std::to_string(i) + " has no name or no shape");
      const bool empty = outputs[i].data == nullptr;
      session->results[outputs[i].name] = empty ? tandem::View{} : view_of(outputs[i]);
    }
    session->session->infer(feeds, session->results);
    for (size_t i = 0; i < output_count; ++i) {
      const tandem::View& view = session->results.at(outputs[i].name);
      outputs[i].dtype = static_cast<tandem_dtype>(view.dtype);
      outputs[i].rank = view.shape.size();
      outputs[i].shape = view.shape.data();
      outputs[i].data = view.data;
    }
    return TANDEM_OK;
  });
}

tandem_status tandem_session_infer_on_stream(tandem_session* session, const tandem_tensor* inputs,
                                             size_t input_count, const tandem_tensor* outputs, size_t output_count,
                                             void* stream) {
  if (session == nullptr || (inputs == nullptr && input_count > 0) || (outputs == nullptr && output_count > 0))
    return bad_argument("tandem_session_infer_on_stream needs a session and its arrays");
  return guarded([&] {
    session->session->infer_on_stream(views_of("input", inputs, input_count),
                                      views_of("output", outputs, output_count), stream);
    return TANDEM_OK;
  });
}

}  // extern "C"
