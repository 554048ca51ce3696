// Opens an engine, and runs sessions of it in four threads at once. All have the same outputs, and each has the
// sentence of its own failure. For checkers of threads and memory:
//
//   sessions_in_threads ENGINE libonnxruntime.so
#include <cstdio>
#include <cstring>
#include <thread>

#include <tandem.hpp>

namespace {

constexpr int kThreads = 4;
constexpr int kSessions = 3;  // of each thread, one after the other
constexpr int kInferences = 3;

// The outputs of arrays in the GPU's memory, which the double takes for the CPU's; whatever else runs them: "".
std::string on_stream(tandem::Session& session, const std::vector<tandem::Tensor>& inputs,
                      const std::vector<tandem::Tensor>& outputs) {
  for (const tandem_report& report : session.reports())
    if (std::strcmp(report.implementation, "cuda") != 0) return "";
  std::vector<std::vector<char>> arrays;
  std::vector<tandem::Tensor> targets = outputs;
  for (tandem::Tensor& target : targets)
    target.data = arrays.emplace_back(target.size() * tandem_dtype_bytes(target.dtype)).data();
  session.infer_on_stream(inputs, targets, nullptr);
  std::string bytes;
  for (const std::vector<char>& array : arrays) bytes.append(array.data(), array.size());
  return bytes;
}

std::string run(const tandem::Engine& engine, const tandem_session_options& options) {
  tandem::Session session(engine, &options);
  std::vector<std::vector<char>> arrays;
  std::vector<tandem::Tensor> inputs;
  for (const tandem::TensorInfo& info : engine.inputs()) {
    tandem::Tensor input{info.name, info.dtype, info.shape, nullptr};
    for (std::int64_t& size : input.shape) size = size < 0 ? 1 : size;
    arrays.emplace_back(input.size() * tandem_dtype_bytes(info.dtype), '\1');
    input.data = arrays.back().data();
    inputs.push_back(std::move(input));
  }
  std::string bytes;
  for (int i = 0; i < kInferences; ++i) {
    bytes.clear();
    const auto outputs = session.infer(inputs);
    for (const tandem::Tensor& output : outputs)
      bytes.append(static_cast<const char*>(output.data), output.size() * tandem_dtype_bytes(output.dtype));
    const std::string others = on_stream(session, inputs, outputs);
    if (!others.empty() && others != bytes) return "";
  }
  return bytes;
}

// True where a failure has its own sentence, while the other threads fail, too.
bool names_its_own(int thread) {
  const std::string path = "/nonexistent/" + std::to_string(thread);
  tandem_engine* engine = nullptr;
  return tandem_engine_open(path.c_str(), &engine) != TANDEM_OK && std::strstr(tandem_last_error(), path.c_str());
}

}  // namespace

int main(int count, char** words) try {
  if (count != 3) return std::fprintf(stderr, "usage: sessions_in_threads ENGINE libonnxruntime.so\n"), 2;
  const tandem::Engine engine(words[1]);
  const tandem_session_options options = {nullptr, 1, words[2], 0};
  std::vector<std::string> outputs(kThreads * kSessions);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread)
    threads.emplace_back([&, thread] {
      for (int i = 0; i < kSessions; ++i) {
        engine.verify();
        if (names_its_own(thread)) outputs[thread * kSessions + i] = run(engine, options);
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::string& bytes : outputs)
    if (bytes.empty() || bytes != outputs.front()) return std::fprintf(stderr, "threads disagree\n"), 1;
  std::printf("%zu sessions agree\n", outputs.size());
  return 0;
} catch (const tandem::Error& error) {
  return std::fprintf(stderr, "sessions_in_threads: %s\n", error.what()), 1;
}
