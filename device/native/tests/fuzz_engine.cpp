// libFuzzer target: each input is an engine file. It is read from memory of its exact size, then opened by
// the interface, verified and run once on zeros, with cuda_double.c in the place of the driver.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <tandem.hpp>

#include "../src/manifest.hpp"

extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t max_size);

namespace {

constexpr std::size_t kPrefix = 8;  // the length of the header, little endian
constexpr std::int64_t kMaxArrayBytes = 1 << 20;

bool is_valid(const std::uint8_t* data, std::size_t size) {
  const std::unique_ptr<char[]> copy(new char[size]);  // a read past its end is seen
  std::memcpy(copy.get(), data, size);
  try {
    const auto container = tandem::internal::read_container({copy.get(), size});
    tandem::internal::check_manifest(tandem::internal::read_manifest(container.manifest), container);
    return true;
  } catch (const tandem::internal::EngineError&) {
    return false;
  }
}

void infer(const tandem::Engine& engine, tandem::Session session) {
  std::vector<std::vector<char>> arrays;
  std::vector<tandem::Tensor> inputs;
  for (const tandem::TensorInfo& info : engine.inputs()) {
    tandem::Tensor input{info.name, info.dtype, info.shape, nullptr};
    auto bytes = static_cast<std::int64_t>(tandem_dtype_bytes(info.dtype));
    for (std::size_t axis = 0; axis < input.shape.size(); ++axis) {
      for (const tandem_dim_info& dim : engine.dims())
        if (input.shape[axis] < 0 && info.dims[axis] == dim.name) input.shape[axis] = dim.max;
      if (__builtin_mul_overflow(bytes, input.shape[axis], &bytes) || bytes > kMaxArrayBytes) return;
    }
    input.data = arrays.emplace_back(static_cast<std::size_t>(bytes) + 1).data();
    inputs.push_back(std::move(input));
  }
  session.infer(inputs);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const int file = ::memfd_create("engine", 0);
  static const std::string path = "/proc/self/fd/" + std::to_string(file);
  if (::ftruncate(file, 0) != 0 || ::pwrite(file, data, size, 0) != static_cast<ssize_t>(size)) std::abort();
  const tandem_session_options options = {nullptr, 1, "/nonexistent/libonnxruntime.so", 0};
  bool opened = false;
  try {
    const tandem::Engine engine(path);
    opened = true;
    engine.verify();
    infer(engine, tandem::Session(engine, &options));
  } catch (const tandem::Error& error) {  // one line of text, and no fault of the library
    if (error.status() == TANDEM_INTERNAL_ERROR || !*error.what() || std::strchr(error.what(), '\n')) std::abort();
  }
  if (opened != is_valid(data, size)) std::abort();
  return 0;
}

// Changes the header alone and states its new length, as nothing behind a wrong length is read.
extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size, std::size_t max_size, unsigned seed) {
  std::uint64_t length = 0;
  if (size >= kPrefix) std::memcpy(&length, data, kPrefix);
  if (seed % 8 == 0 || size < kPrefix || length > size - kPrefix) return LLVMFuzzerMutate(data, size, max_size);
  const std::string sections(data + kPrefix + length, data + size);
  length = LLVMFuzzerMutate(data + kPrefix, length, max_size - kPrefix - sections.size());
  std::memcpy(data, &length, kPrefix);
  std::memcpy(data + kPrefix + length, sections.data(), sections.size());
  return kPrefix + length + sections.size();
}
