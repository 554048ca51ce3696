// Runs an engine: the first implementation of each segment that can run here, tensors in one arena.
#pragma once
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "driver.hpp"
#include "executor.hpp"

namespace tandem::internal {

struct Report {
  std::string segment, processor, implementation, reason;
};

using Views = std::unordered_map<std::string, View>;

class Session {
 public:
  // Throws SessionError, EngineError for a damaged section.
  Session(std::shared_ptr<Engine> engine, const SessionOptions& options);
  ~Session();

  const std::vector<Report>& reports() const { return reports_; }
  const Engine& engine() const { return *engine_; }

  // `inputs`: every input of the engine by name. Outputs are written into their `targets`, the others
  // into memory of the session, until the next call. Throws SessionError.
  void infer(const Views& inputs, const Views& targets);
  // Of the last `infer` that succeeded, in the engine's order; empty before.
  const std::vector<View>& outputs() const { return outputs_; }

  // The same on arrays in the GPU's memory, enqueued on a stream of the caller's, with all targets.
  void infer_on_stream(const Views& inputs, const Views& targets, void* stream);

 private:
  void check_names(const Views& inputs) const;
  std::vector<Int> check_inputs(const Views& inputs) const;
  void check_targets(const Views& targets) const;
  View output_view(const TensorInfo& tensor, const std::vector<Int>& point, const Views& targets);
  void enqueue(const Views& inputs, const Views& targets, const std::vector<Int>& point, void* stream);
  void load(const Segment& segment, const SessionOptions& options);

  std::shared_ptr<Engine> engine_;
  std::vector<std::unique_ptr<Executor>> executors_;
  std::vector<Report> reports_;
  std::unordered_map<std::string, std::vector<char>> owned_;  // outputs that the caller has no array for
  std::vector<View> outputs_;
  char* arena_ = nullptr;
  std::unique_ptr<cuda::Fence> fence_;  // once arrays on the GPU were used
  std::mutex mutex_;
};

}  // namespace tandem::internal
