// Runs an engine on one picture of raw bytes and prints the best classes of its first output:
//
//   classify ENGINE PIXELS.rgb [libonnxruntime.so]
//
// PIXELS.rgb has the bytes of an RGB picture of the engine's size, row by row.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <numeric>

#include <tandem.hpp>

int main(int count, char** words) try {
  if (count < 3) return std::fprintf(stderr, "usage: classify ENGINE PIXELS.rgb [libonnxruntime.so]\n"), 2;
  const tandem::Engine engine(words[1]);
  tandem_session_options options = {};
  if (count > 3) options.onnxruntime = words[3];
  tandem::Session session(engine, &options);
  for (const tandem_report& report : session.reports())
    std::printf("%s on %s: %s\n", report.segment, report.processor, report.implementation);

  const tandem::TensorInfo input = engine.inputs().front();
  if (input.shape.size() != 4 || input.dtype != TANDEM_FLOAT32)
    return std::fprintf(stderr, "input %s is no picture of float32 in NCHW\n", input.name.c_str()), 1;
  std::ifstream file(words[2], std::ios::binary);
  const std::vector<char> pixels{std::istreambuf_iterator<char>(file), {}};
  const auto plane = static_cast<std::size_t>(input.shape[2] * input.shape[3]);
  if (pixels.size() != 3 * plane)
    return std::fprintf(stderr, "%s has %zu bytes, the engine takes %zu\n", words[2], pixels.size(), 3 * plane), 1;
  std::vector<float> values(pixels.size());
  for (std::size_t i = 0; i < plane; ++i)
    for (std::size_t channel = 0; channel < 3; ++channel)
      values[channel * plane + i] = static_cast<unsigned char>(pixels[3 * i + channel]) / 255.0f;

  const std::vector<std::int64_t> shape = {1, 3, input.shape[2], input.shape[3]};
  const auto outputs = session.infer({tandem::Tensor::of<float>(input.name, values.data(), shape)});
  const float* scores = outputs.front().as<float>();
  std::vector<std::size_t> order(outputs.front().size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return scores[a] > scores[b]; });
  for (std::size_t i = 0; i < std::min<std::size_t>(5, order.size()); ++i)
    std::printf("%zu %.6g\n", order[i], scores[order[i]]);
  return 0;
} catch (const tandem::Error& error) {
  std::fprintf(stderr, "classify: %s\n", error.what());
  return 1;
}
