// libFuzzer target: each input chooses a stage, the shapes of its arrays and their values. Arrays have their exact
// sizes, so that an access beyond one is seen; what a stage gives is checked against what its header promises.
#include <tandem_stages.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>

namespace {

void check(bool holds) {
  if (!holds) std::abort();
}

// The bytes of an input as numbers; zeros behind its end.
class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}

  template <typename T>
  T any() {
    T value{};
    const std::size_t count = size_ < sizeof(T) ? size_ : sizeof(T);
    std::memcpy(&value, data_, count);
    data_ += count, size_ -= count;
    return value;
  }

  std::size_t below(std::size_t limit) { return any<std::uint16_t>() % limit; }

  // Most numbers are ones of a picture; some are any bits: NaN, infinite, huge.
  template <typename T>
  T number() {
    const auto kind = any<std::uint8_t>();
    return kind < 16 ? any<T>() : static_cast<T>(kind < 128 ? any<std::uint8_t>() / 255.0 : any<std::int16_t>() / 32.0);
  }

  bool is_empty() const { return size_ == 0; }

 private:
  const std::uint8_t* data_;
  std::size_t size_;
};

template <typename T>
using Array = std::unique_ptr<T[]>;

template <typename T>
Array<T> array(std::size_t count) {
  return Array<T>(new T[count]());
}

template <typename T>
Array<T> numbers(Input& input, std::size_t count) {
  Array<T> values = array<T>(count);
  for (std::size_t i = 0; i < count && !input.is_empty(); ++i) values[i] = input.number<T>();
  return values;
}

void planes(Input& input) {
  tandem_planes_call call{};
  call.rows = input.below(12), call.columns = input.below(70);
  call.pixel_stride = 3 * call.columns + input.below(5);
  call.row_stride = call.columns + input.below(5);
  call.plane_stride = call.rows * call.row_stride + input.below(9);
  call.reversed = input.any<std::uint8_t>() % 2;
  for (int plane = 0; plane < 3; ++plane)
    call.factors[plane] = input.number<float>(), call.shifts[plane] = input.number<float>();
  const bool is_empty = call.rows == 0 || call.columns == 0;
  const std::size_t last = is_empty ? 0 : call.rows - 1;
  const auto pixels = array<std::uint8_t>(is_empty ? 0 : last * call.pixel_stride + 3 * call.columns);
  for (std::size_t i = 0; !is_empty && i < last * call.pixel_stride + 3 * call.columns && !input.is_empty(); ++i)
    pixels[i] = input.any<std::uint8_t>();
  const auto out = array<float>(is_empty ? 0 : 2 * call.plane_stride + last * call.row_stride + call.columns);
  call.pixels = pixels.get(), call.planes = out.get();
  tandem_stages_planes(&call);
  if (is_empty) return;
  const std::size_t channel = call.reversed ? 0 : 2;  // of the last plane
  const float value = static_cast<float>(pixels[last * call.pixel_stride + 3 * (call.columns - 1) + channel]);
  const float expected = value * call.factors[2] - call.shifts[2];
  const float given = out[2 * call.plane_stride + last * call.row_stride + call.columns - 1];
  check(given == expected || (std::isnan(given) && std::isnan(expected)));
}

// Blue, green or red of one pixel by OpenCV's fixed point, from whole numbers of its own.
int byte_of_yuv(int luma, const std::uint8_t* pair, std::size_t channel) {
  constexpr std::int64_t kU[] = {2116026, -409993, 0}, kV[] = {0, -852492, 1673527};
  const std::int64_t bright = luma < 16 ? 0 : (luma - 16) * std::int64_t{1220542};
  const std::int64_t value = bright + kU[channel] * (pair[0] - 128) + kV[channel] * (pair[1] - 128) + (1 << 19);
  return value < 0 ? 0 : value >> 20 > 255 ? 255 : static_cast<int>(value >> 20);
}

void planes_nv12(Input& input) {
  tandem_planes_call call{};
  call.rows = input.below(7), call.columns = input.below(2) * 1019 + input.below(20);
  call.pixel_stride = (call.columns + 1) / 2 * 2 + input.below(5);
  call.row_stride = call.columns + input.below(5);
  call.plane_stride = call.rows * call.row_stride + input.below(9);
  call.reversed = input.any<std::uint8_t>() % 2;
  for (int plane = 0; plane < 3; ++plane)
    call.factors[plane] = input.number<float>(), call.shifts[plane] = input.number<float>();
  if (call.rows == 0 || call.columns == 0) return;
  const std::size_t last = call.rows - 1;
  const std::size_t luma_size = last * call.pixel_stride + call.columns;
  const std::size_t chroma_size = last / 2 * call.pixel_stride + (call.columns + 1) / 2 * 2;
  const auto luma = array<std::uint8_t>(luma_size), chroma = array<std::uint8_t>(chroma_size);
  for (std::size_t i = 0; i < luma_size; ++i) luma[i] = input.any<std::uint8_t>();
  for (std::size_t i = 0; i < chroma_size; ++i) chroma[i] = input.any<std::uint8_t>();
  const auto out = array<float>(2 * call.plane_stride + last * call.row_stride + call.columns);
  call.pixels = luma.get(), call.planes = out.get();
  tandem_stages_planes_nv12(&call, chroma.get());
  for (std::size_t plane = 0; plane < 3; ++plane)
    for (std::size_t y = 0; y < call.rows; ++y)
      for (std::size_t x = 0; x < call.columns; ++x) {
        const std::uint8_t* pair = chroma.get() + y / 2 * call.pixel_stride + x / 2 * 2;
        const int byte = byte_of_yuv(luma[y * call.pixel_stride + x], pair, call.reversed ? 2 - plane : plane);
        const float expected = static_cast<float>(byte) * call.factors[plane] - call.shifts[plane];
        const float given = out[plane * call.plane_stride + y * call.row_stride + x];
        check(given == expected || (std::isnan(given) && std::isnan(expected)));
      }
}

void decode(Input& input) {
  tandem_decode_call call{};
  call.classes = input.below(6), call.cells = input.below(40), call.max_detections = input.below(call.cells + 1);
  for (float* value : {&call.score_threshold, &call.max_iou, &call.scale_x, &call.scale_y, &call.pad_x,
                       &call.pad_y})
    *value = input.number<float>();
  call.frame_width = static_cast<float>(input.below(9999)), call.frame_height = static_cast<float>(input.below(9999));
  const std::size_t most = call.max_detections, extras = input.below(3);
  const auto head = numbers<float>(input, (4 + call.classes + extras) * call.cells);
  const auto boxes = array<float>(4 * most), input_boxes = array<float>(4 * most), scores = array<float>(most);
  const auto class_ids = array<std::int64_t>(most), places = array<std::int64_t>(most);
  call.head = head.get(), call.boxes = boxes.get(), call.input_boxes = input_boxes.get();
  call.scores = scores.get(), call.class_ids = class_ids.get(), call.places = places.get();
  const std::int64_t count = tandem_stages_decode(&call);
  check(count <= static_cast<std::int64_t>(most));
  for (std::int64_t i = 0; i < count; ++i) {
    check(class_ids[i] >= 0 && class_ids[i] < static_cast<std::int64_t>(call.classes));
    check(places[i] >= 0 && places[i] < static_cast<std::int64_t>(call.cells));
    check(scores[i] == head[(4 + class_ids[i]) * call.cells + places[i]] && scores[i] >= call.score_threshold);
    check(i == 0 || scores[i] <= scores[i - 1]);
    check(boxes[4 * i] < boxes[4 * i + 2] && boxes[4 * i + 1] < boxes[4 * i + 3]);
    check(boxes[4 * i] >= 0 && boxes[4 * i + 1] >= 0);
    check(boxes[4 * i + 2] <= call.frame_width && boxes[4 * i + 3] <= call.frame_height);
  }
}

// Tracks of any state, then frames, while there is input.
void track(Input& input) {
  const std::size_t capacity = input.below(24);
  const auto states = numbers<double>(input, 5 * capacity * 4);
  const auto ids = array<std::int64_t>(capacity), class_ids = array<std::int64_t>(capacity);
  const auto hits = array<std::int64_t>(capacity);
  const auto scores = numbers<float>(input, capacity);
  const auto seen_s = numbers<double>(input, capacity);
  const auto status = array<std::int8_t>(capacity);
  tandem_tracks tracks{states.get(), ids.get(),    class_ids.get(), hits.get(), scores.get(),
                       status.get(), seen_s.get(), 0,               capacity,   input.number<double>(), 0};
  tracks.count = input.below(capacity + 1), tracks.next_id = static_cast<std::int64_t>(capacity);
  for (std::size_t row = 0; row < tracks.count; ++row) {
    status[row] = static_cast<std::int8_t>(input.any<std::uint8_t>() % 3);
    ids[row] = status[row] == 0 ? -1 : static_cast<std::int64_t>(row);
    class_ids[row] = input.any<std::uint8_t>() % 3, hits[row] = input.any<std::uint8_t>();
  }
  tandem_tracker config{};
  config.high_score = input.number<float>(), config.low_score = input.number<float>();
  config.start_score = input.number<float>(), config.iou = input.number<float>();
  config.lost_s = input.number<double>(), config.confirm_frames = input.any<std::uint8_t>() % 4;
  config.same_class = input.any<std::uint8_t>() % 2;
  while (!input.is_empty()) {
    const std::size_t count = input.below(capacity - tracks.count + 1);
    const auto boxes = numbers<float>(input, 4 * count), box_scores = numbers<float>(input, count);
    const auto classes = array<std::int64_t>(count), numbers_of = array<std::int64_t>(count);
    const auto stays = array<std::uint8_t>(count);
    for (std::size_t i = 0; i < count; ++i) classes[i] = input.any<std::uint8_t>() % 3;
    const std::int64_t staying =
        tandem_stages_track(&tracks, &config, boxes.get(), box_scores.get(), classes.get(), count,
                            input.number<double>(), numbers_of.get(), stays.get());
    check(tracks.count <= capacity);
    if (staying < 0) continue;
    std::int64_t stay_count = 0;
    for (std::size_t i = 0; i < count; ++i) {
      check(stays[i] <= 1 && numbers_of[i] >= -1 && numbers_of[i] < tracks.next_id);
      stay_count += stays[i];
    }
    check(stay_count == staying);
    for (std::size_t row = 0; row < tracks.count; ++row) {
      check(status[row] >= 0 && status[row] <= 2 && (status[row] == 0) == (ids[row] < 0));
      for (std::size_t other = 0; other < row; ++other) check(ids[row] < 0 || ids[row] != ids[other]);
    }
  }
}

// Heads of a few cells that are followed from frame to frame, while there is input.
void follow(Input& input) {
  constexpr std::size_t kClasses = 2;
  const std::size_t cells = input.below(9), most = input.below(cells + 1), capacity = input.below(12);
  const auto states = array<double>(5 * capacity * 4), seen_s = array<double>(capacity);
  const auto ids = array<std::int64_t>(capacity), class_ids = array<std::int64_t>(capacity);
  const auto hits = array<std::int64_t>(capacity);
  const auto scores = array<float>(capacity);
  const auto status = array<std::int8_t>(capacity);
  tandem_tracks tracks{states.get(), ids.get(),    class_ids.get(), hits.get(), scores.get(),
                       status.get(), seen_s.get(), 0,               capacity,   0.0, 1};
  const tandem_tracker config{0.5f, 0.1f, 0.6f, 0.1f, 1.0, input.any<std::uint8_t>() % 3, 1};
  while (!input.is_empty()) {
    const auto head = numbers<float>(input, (4 + kClasses) * cells);
    const auto boxes = array<float>(4 * most), input_boxes = array<float>(4 * most), most_scores = array<float>(most);
    const auto classes = array<std::int64_t>(most), places = array<std::int64_t>(most);
    const auto numbers_of = array<std::int64_t>(most);
    const tandem_decode_call call{head.get(), kClasses, cells, most, 0.05f, 0.5f, 1.0f, 1.0f, 0.0f, 0.0f, 640.0f,
                                  480.0f, boxes.get(), input_boxes.get(), most_scores.get(), classes.get(),
                                  places.get()};
    std::int64_t decoded_ns = 0;
    const std::size_t before = tracks.count;
    const std::int64_t staying = tandem_stages_follow(&call, &tracks, &config, input.number<double>(),
                                                      numbers_of.get(), &decoded_ns);
    check(decoded_ns > 0 && tracks.count <= capacity && staying <= static_cast<std::int64_t>(most));
    check(staying >= 0 || tracks.count == before);
    for (std::int64_t i = 0; i < staying; ++i) {
      check(numbers_of[i] >= -1 && numbers_of[i] < tracks.next_id);
      check(most_scores[i] == head[(4 + classes[i]) * cells + places[i]]);
      check(boxes[4 * i] < boxes[4 * i + 2] && boxes[4 * i + 2] <= call.frame_width);
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  void (*const stages[])(Input&) = {planes, planes_nv12, decode, track, follow};
  stages[input.any<std::uint8_t>() % 5](input);
  return 0;
}
