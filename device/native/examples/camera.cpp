// Finds and follows objects in a camera's frames, and prints a line of JSON for each:
//
//   camera ENGINE /dev/video0 WIDTH HEIGHT [libonnxruntime.so]
//   ffmpeg -i FILE -pix_fmt nv12 -f rawvideo - | camera ENGINE - WIDTH HEIGHT [libonnxruntime.so]
//
// ENGINE takes RGB, float32 [1, 3, height, width], and gives distances [1, 4, cells] and scores [1, classes, cells]
// of grids of 8, 16 and 32 pixels, as robot-objects does. Frames of standard input are NV12, 30 a second.
#include <cstdio>
#include <cstdlib>

#include "pictures.hpp"

constexpr const char* kUsage = "usage: camera ENGINE /dev/video0|- WIDTH HEIGHT [libonnxruntime.so]; even sizes";

std::unique_ptr<Pictures> open_pictures(const std::string& source, std::size_t width, std::size_t height) {
  if (source == "-") return std::make_unique<StandardInput>(width, height);
  return std::make_unique<Camera>(source, width, height);
}

void print(const std::vector<tandem::TrackedObject>& objects, std::size_t frame, double time_s) {
  std::printf("{\"frame\": %zu, \"time_s\": %.6f, \"objects\": [", frame, time_s);
  const char* comma = "";
  for (const auto& one : objects) {
    std::printf("%s{\"track\": %lld, \"class\": %lld, \"score\": %.4f, \"box\": [%.3f, %.3f, %.3f, %.3f]}", comma,
                static_cast<long long>(one.track), static_cast<long long>(one.class_id), one.score, one.x1, one.y1,
                one.x2, one.y2);
    comma = ", ";
  }
  std::printf("]}\n");
  if (std::fflush(stdout) != 0) fail_of_system("standard output takes no more");
}

int main(int count, char** words) try {
  const std::size_t width = count > 4 ? std::strtoul(words[3], nullptr, 10) : 0;
  const std::size_t height = count > 4 ? std::strtoul(words[4], nullptr, 10) : 0;
  if (width < 2 || height < 2 || width % 2 || height % 2 || width > 16384 || height > 16384)
    return std::fprintf(stderr, "%s\n", kUsage), 2;
  stop_at_signals();

  const tandem::Engine engine(words[1]);
  if (engine.inputs().size() != 1 || engine.outputs().size() != 2)
    fail(std::string(words[1]) + " has not one input, distances and scores: change what follows for it");
  tandem_session_options options = {};
  if (count > 5) options.onnxruntime = words[5];
  tandem::Session session(engine, &options);

  const auto pictures = open_pictures(words[2], width, height);  // whose size may be another one
  tandem::PictureInput input(engine.inputs()[0], pictures->picture.width, pictures->picture.height);
  tandem::Tracker tracker;
  for (std::size_t frame = 0; pictures->next(); ++frame) {
    const auto outputs = session.infer({input.write(pictures->picture)});
    const auto head = tandem::head_of_distances(outputs[0], outputs[1], input);
    const std::size_t cells = outputs[0].size() / 4, classes = outputs[1].size() / cells;
    const auto found = tandem::decode(head.data(), classes, cells, input);
    print(tracker.update(found, pictures->time_s), frame, pictures->time_s);
  }
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "camera: %s\n", error.what());
  return 1;
}
