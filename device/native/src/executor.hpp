// One segment, loaded by one of its implementations.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine.hpp"

namespace tandem::internal {

// An array on the host in C order.
struct View {
  int dtype = -1;
  std::vector<std::int64_t> shape;
  void* data = nullptr;
};

struct SessionOptions {
  std::string profile;
  std::string onnxruntime;
  int threads = 0;
  bool portable = false;
};

class Executor {
 public:
  virtual ~Executor() = default;
  // `inputs` and `outputs` in the segment's order; `point`: the sizes of the dynamic dimensions. An
  // output without data gets its shape, and data that the executor keeps until its next run. Throws
  // SessionError.
  virtual void run(const std::vector<View>& inputs, std::vector<View>& outputs,
                   const std::vector<Int>& point) = 0;
  virtual std::string description() const = 0;

  // -- on the GPU: borders are the inputs, then the outputs; another executor throws SessionError ----
  virtual std::uint64_t address(std::size_t border) const;
  // Checks the sizes first.
  virtual std::vector<std::int64_t> shape(std::size_t border, const std::vector<Int>& point);
  virtual void enqueue(const std::vector<Int>& point, void* stream);
};

// Throw SessionError: why the segment cannot run this way here.
std::unique_ptr<Executor> load_portable(Engine& engine, const Segment& segment, const Portable& part,
                                        const SessionOptions& options);
std::unique_ptr<Executor> load_cuda(Engine& engine, const Segment& segment, const Cuda& part);
std::unique_ptr<Executor> load_tensorrt(Engine& engine, const Segment& segment, const TensorRT& part);

}  // namespace tandem::internal
