// Runs an engine: the first implementation of each segment that can run here, tensors in one arena.
#pragma once
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "executor.hpp"

namespace tandem {

struct Report {
  std::string segment, processor, implementation, reason;
};

class Session {
 public:
  // Throws SessionError, EngineError for a damaged section.
  Session(std::shared_ptr<Engine> engine, const SessionOptions& options);
  ~Session();

  const std::vector<Report>& reports() const { return reports_; }
  const Engine& engine() const { return *engine_; }

  // `inputs`: every input of the engine by name. `outputs`: those with data are written there, the
  // others point to memory of the session afterwards. Throws SessionError.
  void infer(const std::unordered_map<std::string, View>& inputs,
             std::unordered_map<std::string, View>& outputs);

  // The same on arrays in the GPU's memory, enqueued on a stream of the caller's; every output has data.
  void infer_on_stream(const std::unordered_map<std::string, View>& inputs,
                       const std::unordered_map<std::string, View>& outputs, void* stream);

 private:
  std::vector<Int> check_inputs(const std::unordered_map<std::string, View>& inputs) const;
  View output_view(const TensorInfo& tensor, const std::vector<Int>& point,
                   std::unordered_map<std::string, View>& outputs);
  void load(const Segment& segment, const SessionOptions& options);

  std::shared_ptr<Engine> engine_;
  std::vector<std::unique_ptr<Executor>> executors_;
  std::vector<Report> reports_;
  std::unordered_map<std::string, std::vector<char>> owned_;  // outputs that the caller has no array for
  char* arena_ = nullptr;
  std::mutex mutex_;
};

}  // namespace tandem
