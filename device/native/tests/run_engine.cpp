// Runs an engine on arrays of a file, float32 in C order one frame behind the other, and writes all outputs to another.
// Says how each segment runs, or the sentence of what failed. For tests below checkers of memory:
//
//   run_engine ENGINE libonnxruntime.so INPUT OUTPUT
#include <cstdio>
#include <fstream>

#include <tandem.hpp>

int main(int count, char** words) try {
  if (count != 5) return std::fprintf(stderr, "usage: run_engine ENGINE libonnxruntime.so INPUT OUTPUT\n"), 2;
  const tandem::Engine engine(words[1]);
  const tandem_session_options options = {nullptr, 1, words[2], 0};
  tandem::Session session(engine, &options);
  for (const tandem_report& report : session.reports())
    std::printf("%s: %s: %s\n", report.processor, report.implementation, report.reason);
  const tandem::TensorInfo info = engine.inputs().at(0);
  tandem::Tensor input{info.name, info.dtype, info.shape, nullptr};
  std::vector<char> array(input.size() * tandem_dtype_bytes(info.dtype));
  input.data = array.data();
  std::ifstream file(words[3], std::ios::binary);
  std::ofstream result(words[4], std::ios::binary);
  while (file.read(array.data(), static_cast<std::streamsize>(array.size())))
    for (const tandem::Tensor& output : session.infer({input}))
      result.write(static_cast<const char*>(output.data),
                   static_cast<std::streamsize>(output.size() * tandem_dtype_bytes(output.dtype)));
  return 0;
} catch (const tandem::Error& error) {
  std::printf("error: %s\n", error.what());
  return 1;
}
