// Finds and follows objects in a camera's frames, and prints a line of JSON for each:
//
//   camera ENGINE /dev/video0 WIDTH HEIGHT [libonnxruntime.so]
//   ffmpeg -i FILE -pix_fmt nv12 -f rawvideo - | camera ENGINE - WIDTH HEIGHT [libonnxruntime.so]
//
// ENGINE takes RGB, float32 [1, 3, height, width], and gives distances [1, 4, cells] and scores [1, classes, cells]
// of grids of 8, 16 and 32 pixels, as robot-objects does. Frames of standard input are NV12, 30 a second.
#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <linux/videodev2.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <tandem.hpp>
#include <tandem_stages.h>

using Bytes = std::vector<std::uint8_t>;
constexpr std::size_t kMost = 100, kTracks = 1000;  // detections of a frame, and tracks
constexpr const char* kUsage = "usage: camera ENGINE /dev/video0|- WIDTH HEIGHT [libonnxruntime.so]; even sizes";
volatile std::sig_atomic_t stopped = 0;

[[noreturn]] void fail(const std::string& what) { throw std::runtime_error(what); }
[[noreturn]] void fail_of_system(const std::string& what) { fail(what + ": " + std::strerror(errno)); }

struct Source {
  virtual ~Source() = default;
  virtual const std::uint8_t* next() = 0;  // until the next call; nullptr at the end
  std::size_t width = 0, height = 0, stride = 0;
  bool is_yuyv = false;  // NV12 otherwise
  double time_s = 0.0;
};

struct StandardInput : Source {
  StandardInput(std::size_t columns, std::size_t rows) : bytes(columns * rows * 3 / 2) {
    width = stride = columns, height = rows;
  }
  const std::uint8_t* next() override {
    for (std::size_t at = 0; at < bytes.size();) {
      const ssize_t count = read(STDIN_FILENO, bytes.data() + at, bytes.size() - at);
      if (stopped || (count == 0 && at == 0)) return nullptr;
      if (count < 0 && errno != EINTR) fail_of_system("standard input cannot be read");
      if (count == 0) fail("standard input ended within a frame: give the WIDTH and HEIGHT that its frames have");
      if (count > 0) at += static_cast<std::size_t>(count);
    }
    time_s = static_cast<double>(frame++) / 30.0;
    return bytes.data();
  }
  Bytes bytes;
  std::size_t frame = 0;
};

struct Camera : Source {  // frames lie in the driver's memory, which the end of the process gives back
  Camera(const std::string& name, std::size_t columns, std::size_t rows)
      : path(name), file(open(name.c_str(), O_RDWR)) {
    if (file < 0) fail_of_system(path + " cannot be opened (name a camera of /dev/video*, join the group video)");
    v4l2_format format = {};
    for (const std::uint32_t pixels : {V4L2_PIX_FMT_NV12, V4L2_PIX_FMT_YUYV}) {
      format.type = V4L2_BUF_TYPE_VIDEO_CAPTURE;
      format.fmt.pix = {};
      format.fmt.pix.width = static_cast<std::uint32_t>(columns);
      format.fmt.pix.height = static_cast<std::uint32_t>(rows);
      format.fmt.pix.pixelformat = pixels;
      call(VIDIOC_S_FMT, &format, "captures no frames (name another of /dev/video*)");
      if (format.fmt.pix.pixelformat == pixels) break;
    }
    is_yuyv = format.fmt.pix.pixelformat == V4L2_PIX_FMT_YUYV;
    if (!is_yuyv && format.fmt.pix.pixelformat != V4L2_PIX_FMT_NV12)
      fail(path + " gives neither NV12 nor YUYV: decode its frames elsewhere, and give them to standard input");
    width = format.fmt.pix.width, height = format.fmt.pix.height, stride = format.fmt.pix.bytesperline;  // the driver's
    v4l2_requestbuffers request = {};
    request.count = 4;
    request.type = V4L2_BUF_TYPE_VIDEO_CAPTURE;
    request.memory = V4L2_MEMORY_MMAP;
    call(VIDIOC_REQBUFS, &request, "gives no memory (another program may have it)");
    for (std::uint32_t index = 0; index < request.count; ++index) {
      buffer.index = index, buffer.type = request.type, buffer.memory = request.memory;
      call(VIDIOC_QUERYBUF, &buffer, "gives no memory");
      void* memory = mmap(nullptr, buffer.length, PROT_READ, MAP_SHARED, file, buffer.m.offset);
      if (memory == MAP_FAILED) fail_of_system(path + ": its memory cannot be mapped");
      frames.push_back(static_cast<const std::uint8_t*>(memory));
      call(VIDIOC_QBUF, &buffer, "takes no memory back");
    }
    call(VIDIOC_STREAMON, &request.type, "does not start (another program may have it)");
  }
  const std::uint8_t* next() override {
    do {
      if (is_taken) call(VIDIOC_QBUF, &buffer, "takes no memory back (is it still connected?)");
      is_taken = false;
      while (ioctl(file, VIDIOC_DQBUF, &buffer) != 0) {
        if (stopped) return nullptr;
        if (errno != EINTR) fail_of_system(path + " gives no frame (is it still connected?)");
      }
      is_taken = true;
    } while (buffer.flags & V4L2_BUF_FLAG_ERROR);  // a damaged frame
    time_s = static_cast<double>(buffer.timestamp.tv_sec) + static_cast<double>(buffer.timestamp.tv_usec) * 1e-6;
    return stopped ? nullptr : frames[buffer.index];
  }
  void call(unsigned long request, void* value, const char* failure) {
    if (ioctl(file, request, value) != 0) fail_of_system(path + " " + failure);
  }
  std::string path;
  int file;
  v4l2_buffer buffer = {};
  std::vector<const std::uint8_t*> frames;
  bool is_taken = false;
};

// Writes means of `across` x `down` samples, which lie `step` bytes apart in rows of `stride`; results `gap` apart.
void shrink(const std::uint8_t* from, std::size_t step, std::size_t stride, std::size_t across, std::size_t down,
            std::uint8_t* to, std::size_t gap, std::size_t columns, std::size_t rows) {
  for (std::size_t y = 0; y < rows; ++y)
    for (std::size_t x = 0; x < columns; ++x, to += gap) {
      std::size_t sum = across * down / 2;
      for (std::size_t i = 0; i < down; ++i)
        for (std::size_t j = 0; j < across; ++j) sum += from[(y * down + i) * stride + (x * across + j) * step];
      *to = static_cast<std::uint8_t>(sum / (across * down));
    }
}

struct Input {  // of the engine, with the frame's 1 / `factor` in the middle of grey
  Input(const Source& source, std::size_t columns, std::size_t rows)
      : width(columns), height(rows), values(3 * width * height, 114 / 255.0f) {
    factor = std::max({std::size_t{1}, (source.width + width - 1) / width, (source.height + height - 1) / height});
    inner_width = source.width / factor / 2 * 2, inner_height = source.height / factor / 2 * 2;
    left = (width - inner_width) / 2, top = (height - inner_height) / 2;
    pixels.resize(inner_width * inner_height * 3 / 2);
  }
  void write(const Source& source, const std::uint8_t* frame) {
    std::uint8_t* chroma = pixels.data() + inner_width * inner_height;
    const std::size_t stride = source.stride, step = source.is_yuyv ? 4 : 2;
    const std::size_t down = source.is_yuyv ? 2 * factor : factor;
    const std::uint8_t* u = source.is_yuyv ? frame + 1 : frame + stride * source.height;
    const std::uint8_t* v = source.is_yuyv ? frame + 3 : u + 1;
    shrink(frame, source.is_yuyv ? 2 : 1, stride, factor, factor, pixels.data(), 1, inner_width, inner_height);
    shrink(u, step, stride, factor, down, chroma, 2, inner_width / 2, inner_height / 2);
    shrink(v, step, stride, factor, down, chroma + 1, 2, inner_width / 2, inner_height / 2);
    constexpr float kScale = 1 / 255.0f;
    const tandem_planes_call call = {
        pixels.data(), values.data() + top * width + left, {kScale, kScale, kScale}, {}, inner_height, inner_width,
        inner_width, width, width * height, 1};
    tandem_stages_planes_nv12(&call, chroma);
  }
  std::size_t width, height, factor, inner_width, inner_height, left, top;
  std::vector<float> values;
  Bytes pixels;
};

struct Objects {  // of one frame, best first
  std::vector<float> boxes, input_boxes, scores;
  std::vector<std::int64_t> class_ids, cells, ids;
  std::vector<std::uint8_t> stays;
  std::size_t count;
};

// Turns distances from the cells' centres into centres and sizes, which the stages take.
std::vector<float> head_of(const std::vector<tandem::Tensor>& outputs, const Input& input) {
  const bool is_pair = outputs.size() == 2 && outputs[0].shape.size() == 3 && outputs[1].shape.size() == 3;
  std::size_t cells = 0;
  for (const std::size_t side : {8, 16, 32}) cells += (input.width / side) * (input.height / side);
  if (!is_pair || outputs[0].size() != 4 * cells || outputs[1].size() % cells != 0)
    fail("the engine's outputs are no distances [1, 4, cells] and scores [1, classes, cells]: change head_of for it");
  const float *sides = outputs[0].as<float>(), *scores = outputs[1].as<float>();
  std::vector<float> head(4 * cells);
  float* to = head.data();
  for (const std::size_t side : {8, 16, 32})
    for (std::size_t y = 0; y < input.height / side; ++y)
      for (std::size_t x = 0; x < input.width / side; ++x, ++to, ++sides) {
        const auto size = static_cast<float>(side);
        const float left = sides[0], top = sides[cells], right = sides[2 * cells], bottom = sides[3 * cells];
        to[0] = (static_cast<float>(x) + 0.5f + (right - left) / 2) * size;
        to[cells] = (static_cast<float>(y) + 0.5f + (bottom - top) / 2) * size;
        to[2 * cells] = (left + right) * size;
        to[3 * cells] = (top + bottom) * size;
      }
  head.insert(head.end(), scores, scores + outputs[1].size());
  return head;
}

Objects decoded(const std::vector<float>& head, std::size_t classes, const Source& source, const Input& input) {
  const std::vector<float> boxes(4 * kMost), scores(kMost);
  const std::vector<std::int64_t> integers(kMost);
  Objects found{boxes, boxes, scores, integers, integers, integers, std::vector<std::uint8_t>(kMost), 0};
  const float scale = 1.0f / static_cast<float>(input.factor);
  const tandem_decode_call call = {
      head.data(), classes, head.size() / (4 + classes), kMost, 0.35f, 0.5f, scale, scale,
      static_cast<float>(input.left), static_cast<float>(input.top), static_cast<float>(source.width),
      static_cast<float>(source.height), found.boxes.data(), found.input_boxes.data(), found.scores.data(),
      found.class_ids.data(), found.cells.data()};
  const std::int64_t count = tandem_stages_decode(&call);
  if (count < 0) fail("the engine's scores or boxes are no numbers, or too many: build it with more precision");
  found.count = static_cast<std::size_t>(count);
  return found;
}

class Tracker {
 public:
  Tracker()
      : states_(20 * kTracks), seen_s_(kTracks), ids_(kTracks), class_ids_(kTracks), hits_(kTracks), scores_(kTracks),
        status_(kTracks), tracks_{states_.data(), ids_.data(), class_ids_.data(), hits_.data(), scores_.data(),
                                  status_.data(), seen_s_.data(), 0, kTracks, 0.0, 1} {}
  void update(Objects& found, double time_s) {
    const tandem_tracker config = {0.5f, 0.1f, 0.6f, 0.1f, 1.0, 2, 1};
    if (tracks_.count + found.count > kTracks) fail("there are more tracks than kTracks of this program: raise it");
    if (tandem_stages_track(&tracks_, &config, found.boxes.data(), found.scores.data(), found.class_ids.data(),
                            found.count, time_s, found.ids.data(), found.stays.data()) < 0)
      fail("a box of the engine is no number: build it with more precision");
  }

 private:
  std::vector<double> states_, seen_s_;
  std::vector<std::int64_t> ids_, class_ids_, hits_;
  std::vector<float> scores_;
  std::vector<std::int8_t> status_;
  tandem_tracks tracks_;
};

void print(const Objects& found, std::size_t frame, double time_s) {
  std::printf("{\"frame\": %zu, \"time_s\": %.6f, \"objects\": [", frame, time_s);
  const char* comma = "";
  for (std::size_t i = 0; i < found.count; ++i) {
    if (!found.stays[i]) continue;
    const float* box = found.boxes.data() + 4 * i;
    std::printf("%s{\"track\": %lld, \"class\": %lld, \"score\": %.4f, \"box\": [%.3f, %.3f, %.3f, %.3f]}", comma,
                static_cast<long long>(found.ids[i]), static_cast<long long>(found.class_ids[i]), found.scores[i],
                box[0], box[1], box[2], box[3]);
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
  struct sigaction action = {};
  action.sa_handler = [](int) { stopped = 1; };
  for (const int number : {SIGINT, SIGTERM}) sigaction(number, &action, nullptr);  // reads end: no SA_RESTART

  const tandem::Engine engine(words[1]);
  const auto inputs = engine.inputs();
  const auto& shape = inputs.front().shape;
  const bool is_picture = inputs[0].dtype == TANDEM_FLOAT32 && shape.size() == 4 && shape[1] == 3;
  if (inputs.size() != 1 || !is_picture || std::min(shape[2], shape[3]) < 2)
    fail(std::string(words[1]) + " takes no float32 [1, 3, height, width] of fixed sizes: build one that does");
  tandem_session_options options = {};
  if (count > 5) options.onnxruntime = words[5];
  tandem::Session session(engine, &options);
  std::unique_ptr<Source> source;
  if (std::strcmp(words[2], "-") == 0) source = std::make_unique<StandardInput>(width, height);
  else source = std::make_unique<Camera>(words[2], width, height);
  Input input(*source, static_cast<std::size_t>(shape[3]), static_cast<std::size_t>(shape[2]));
  Tracker tracker;
  for (std::size_t frame = 0; const std::uint8_t* bytes = source->next(); ++frame) {
    input.write(*source, bytes);
    const auto tensor = tandem::Tensor::of(inputs[0].name, input.values.data(), {1, 3, shape[2], shape[3]});
    const auto outputs = session.infer({tensor});
    Objects found = decoded(head_of(outputs, input), static_cast<std::size_t>(outputs[1].shape[1]), *source, input);
    tracker.update(found, source->time_s);
    print(found, frame, source->time_s);
  }
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "camera: %s\n", error.what());
  return 1;
}
