// Engines of Tandem in C++17, over tandem.h. Failures are exceptions of tandem::Error.
#pragma once
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "tandem.h"

namespace tandem {

class Error : public std::runtime_error {
 public:
  explicit Error(tandem_status status) : std::runtime_error(tandem_last_error()), status_(status) {}
  tandem_status status() const noexcept { return status_; }

 private:
  tandem_status status_;
};

inline void check(tandem_status status) {
  if (status != TANDEM_OK) throw Error(status);
}

template <typename T>
struct DtypeOf;
template <> struct DtypeOf<bool> { static constexpr tandem_dtype value = TANDEM_BOOL; };
template <> struct DtypeOf<std::int8_t> { static constexpr tandem_dtype value = TANDEM_INT8; };
template <> struct DtypeOf<std::uint8_t> { static constexpr tandem_dtype value = TANDEM_UINT8; };
template <> struct DtypeOf<std::int16_t> { static constexpr tandem_dtype value = TANDEM_INT16; };
template <> struct DtypeOf<std::uint16_t> { static constexpr tandem_dtype value = TANDEM_UINT16; };
template <> struct DtypeOf<std::int32_t> { static constexpr tandem_dtype value = TANDEM_INT32; };
template <> struct DtypeOf<std::uint32_t> { static constexpr tandem_dtype value = TANDEM_UINT32; };
template <> struct DtypeOf<float> { static constexpr tandem_dtype value = TANDEM_FLOAT32; };
template <> struct DtypeOf<std::int64_t> { static constexpr tandem_dtype value = TANDEM_INT64; };
template <> struct DtypeOf<std::uint64_t> { static constexpr tandem_dtype value = TANDEM_UINT64; };
template <> struct DtypeOf<double> { static constexpr tandem_dtype value = TANDEM_FLOAT64; };

// An array in C order; it does not own its data.
struct Tensor {
  std::string name;
  tandem_dtype dtype = TANDEM_FLOAT32;
  std::vector<std::int64_t> shape;
  void* data = nullptr;

  template <typename T>
  static Tensor of(std::string name, T* data, std::vector<std::int64_t> shape) {
    using Element = std::remove_const_t<T>;
    return {std::move(name), DtypeOf<Element>::value, std::move(shape), const_cast<Element*>(data)};
  }

  std::size_t size() const {
    std::size_t elements = 1;
    for (const std::int64_t dim : shape) elements *= static_cast<std::size_t>(dim);
    return elements;
  }

  // Throws std::invalid_argument where the elements are of another type.
  template <typename T>
  const T* as() const {
    if (DtypeOf<T>::value != dtype)
      throw std::invalid_argument(name + " is of " + tandem_dtype_name(dtype));
    return static_cast<const T*>(data);
  }
};

struct TensorInfo {
  std::string name;
  tandem_dtype dtype;
  std::vector<std::int64_t> shape;  // -1: see `dims`
  std::vector<std::string> dims;    // "" of a fixed size, or one that only a run tells
  double scale;
};

class Engine {
 public:
  explicit Engine(const std::string& path) {
    tandem_engine* engine = nullptr;
    check(tandem_engine_open(path.c_str(), &engine));
    engine_.reset(engine, tandem_engine_close);
  }

  void verify() const { check(tandem_engine_verify(engine_.get())); }
  std::string profile() const { return tandem_engine_profile(engine_.get()); }
  std::string precision() const { return tandem_engine_precision(engine_.get()); }
  bool uncalibrated() const { return tandem_engine_uncalibrated(engine_.get()) != 0; }
  std::string manifest() const { return tandem_engine_manifest(engine_.get()); }

  std::vector<TensorInfo> inputs() const {
    return infos(tandem_engine_input_count(engine_.get()), tandem_engine_input);
  }
  std::vector<TensorInfo> outputs() const {
    return infos(tandem_engine_output_count(engine_.get()), tandem_engine_output);
  }
  std::vector<tandem_dim_info> dims() const {
    std::vector<tandem_dim_info> rows(tandem_engine_dim_count(engine_.get()));
    for (std::size_t i = 0; i < rows.size(); ++i) check(tandem_engine_dim(engine_.get(), i, &rows[i]));
    return rows;
  }

  tandem_engine* handle() const noexcept { return engine_.get(); }

 private:
  template <typename Read>
  std::vector<TensorInfo> infos(std::size_t count, Read read) const {
    std::vector<TensorInfo> rows;
    for (std::size_t i = 0; i < count; ++i) {
      tandem_tensor_info info;
      check(read(engine_.get(), i, &info));
      TensorInfo row{info.name, info.dtype, {info.shape, info.shape + info.rank}, {}, info.scale};
      for (std::size_t axis = 0; axis < info.rank; ++axis)
        row.dims.emplace_back(info.dims[axis] == nullptr ? "" : info.dims[axis]);
      rows.push_back(std::move(row));
    }
    return rows;
  }

  std::shared_ptr<tandem_engine> engine_;
};

class Session {
 public:
  explicit Session(const Engine& engine, const tandem_session_options* options = nullptr)
      : output_count_(tandem_engine_output_count(engine.handle())) {
    tandem_session* session = nullptr;
    check(tandem_session_open(engine.handle(), options, &session));
    session_.reset(session);
  }

  std::vector<tandem_report> reports() const {
    std::vector<tandem_report> rows(tandem_session_report_count(session_.get()));
    for (std::size_t i = 0; i < rows.size(); ++i) check(tandem_session_report(session_.get(), i, &rows[i]));
    return rows;
  }

  // All outputs, in the engine's order. Those without an array in `targets` lie in the session's memory:
  // the next inference overwrites them.
  std::vector<Tensor> infer(const std::vector<Tensor>& inputs, const std::vector<Tensor>& targets = {}) {
    const auto feeds = in_c(inputs), places = in_c(targets);
    check(tandem_session_infer(session_.get(), feeds.data(), feeds.size(), places.data(), places.size()));
    std::vector<Tensor> tensors;
    for (std::size_t i = 0; i < output_count_; ++i) {
      tandem_tensor output;
      check(tandem_session_output(session_.get(), i, &output));
      tensors.push_back({output.name, output.dtype, {output.shape, output.shape + output.rank}, output.data});
    }
    return tensors;
  }

  // The same on arrays in the GPU's memory, with a target for every output: see tandem_session_infer_on_stream.
  void infer_on_stream(const std::vector<Tensor>& inputs, const std::vector<Tensor>& targets, void* stream) {
    const auto feeds = in_c(inputs), places = in_c(targets);
    check(tandem_session_infer_on_stream(session_.get(), feeds.data(), feeds.size(), places.data(), places.size(),
                                         stream));
  }

 private:
  static std::vector<tandem_tensor> in_c(const std::vector<Tensor>& tensors) {
    std::vector<tandem_tensor> rows;
    for (const Tensor& one : tensors)
      rows.push_back({one.name.c_str(), one.dtype, one.shape.size(), one.shape.data(), one.data});
    return rows;
  }

  struct Close {
    void operator()(tandem_session* session) const { tandem_session_close(session); }
  };
  std::size_t output_count_;
  std::unique_ptr<tandem_session, Close> session_;
};

}  // namespace tandem
