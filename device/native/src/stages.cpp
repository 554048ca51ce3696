// Preprocessing and decoding on arrays: the operations of pipelines/stages/preprocess.py, candidates.py and
// nms.py, in their order and their precision. Built without contraction of products and sums.
#include "tandem_stages.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <new>
#include <utility>
#include <vector>

// The vectors of x86-64's first machines lack what takes bytes apart. Clones are chosen before a sanitizer has begun.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define TANDEM_VECTORS __attribute__((target_clones("avx2", "default")))
#else
#define TANDEM_VECTORS
#endif

namespace {

constexpr std::size_t kMaxCandidates = 30000;
constexpr double kFar = 1e6;  // pixels

// Writes a row of three planes in pieces by `write(begin, end)`. An input is larger than the caches, and its planes
// lie in pages at whose ends a processor's own prefetching stops: what is written about a row later is asked for now.
template <typename Write>
inline __attribute__((always_inline)) void write_row(const float* first, const float* second, const float* third,
                                                     std::size_t columns, const Write& write) {
  constexpr std::size_t kPiece = 64, kLine = 16, kAhead = 640;  // floats
  std::size_t begin = 0;
  for (; begin + kPiece <= columns; begin += kPiece) {
    for (const float* plane : {first, second, third})
      for (std::size_t i = 0; i < kPiece; i += kLine) __builtin_prefetch(plane + begin + kAhead + i, 1);
    write(begin, begin + kPiece);
  }
  write(begin, columns);
}

TANDEM_VECTORS void normalise_row(const std::uint8_t* __restrict pixels, std::size_t columns,
                                  float* __restrict first, float* __restrict second, float* __restrict third,
                                  const float* factors, const float* shifts) {
  const float factor0 = factors[0], factor1 = factors[1], factor2 = factors[2];
  const float shift0 = shifts[0], shift1 = shifts[1], shift2 = shifts[2];
  write_row(first, second, third, columns, [&](std::size_t begin, std::size_t end) {
    for (std::size_t x = begin; x < end; ++x) {
      first[x] = static_cast<float>(pixels[3 * x]) * factor0 - shift0;
      second[x] = static_cast<float>(pixels[3 * x + 1]) * factor1 - shift1;
      third[x] = static_cast<float>(pixels[3 * x + 2]) * factor2 - shift2;
    }
  });
}

// Blue, green and red by BT.601 in OpenCV's fixed point.
constexpr int kShift = 20;
constexpr int kLuma = 1220542, kBlueU = 2116026, kGreenU = -409993, kGreenV = -852492, kRedV = 1673527;

// What the chroma of a row adds to each pixel's blue, green and red, rounded; an even number of columns.
TANDEM_VECTORS void chroma_row(const std::uint8_t* __restrict chroma, std::size_t columns, int* __restrict blue,
                               int* __restrict green, int* __restrict red) {
  for (std::size_t x = 0; x < columns; x += 2) {
    const int u = chroma[x] - 128, v = chroma[x + 1] - 128, half = 1 << (kShift - 1);
    blue[x] = blue[x + 1] = half + kBlueU * u;
    green[x] = green[x + 1] = half + kGreenV * v + kGreenU * u;
    red[x] = red[x + 1] = half + kRedV * v;
  }
}

TANDEM_VECTORS void normalise_nv12_row(const std::uint8_t* __restrict luma, std::size_t columns,
                                       const int* __restrict blue, const int* __restrict green,
                                       const int* __restrict red, float* __restrict first,
                                       float* __restrict second, float* __restrict third, const float* factors,
                                       const float* shifts) {
  const float factor0 = factors[0], factor1 = factors[1], factor2 = factors[2];
  const float shift0 = shifts[0], shift1 = shifts[1], shift2 = shifts[2];
  const auto byte = [](int value) { return std::min(std::max(value >> kShift, 0), 255); };
  write_row(first, second, third, columns, [&](std::size_t begin, std::size_t end) {
    for (std::size_t x = begin; x < end; ++x) {
      const int bright = std::max(luma[x] - 16, 0) * kLuma;
      first[x] = static_cast<float>(byte(bright + blue[x])) * factor0 - shift0;
      second[x] = static_cast<float>(byte(bright + green[x])) * factor1 - shift1;
      third[x] = static_cast<float>(byte(bright + red[x])) * factor2 - shift2;
    }
  });
}

// The planes of a call by channel: factors, shifts and where they begin.
struct Channels {
  explicit Channels(const tandem_planes_call& call) {
    for (std::size_t channel = 0; channel < 3; ++channel) {
      const std::size_t plane = call.reversed ? 2 - channel : channel;
      factors[channel] = call.factors[plane];
      shifts[channel] = call.shifts[plane];
      planes[channel] = call.planes + plane * call.plane_stride;
    }
  }

  float factors[3], shifts[3];
  float* planes[3];
};

// Raises `best` [count] to the largest of some rows, eight at a time. A head is larger than the caches, and its
// rows are longer than the pages at whose ends a processor's own prefetching stops. A NaN that is not the first
// of its column is passed over: `candidates_of` looks for it.
TANDEM_VECTORS void raise_to(float* __restrict best, const float* __restrict rows, std::size_t row_count,
                             std::size_t count) {
  const auto larger = [](float score, float other) { return score > other ? score : other; };
  constexpr std::size_t kRows = 8, kColumns = 16, kAhead = 128;
  const auto raise = [&](std::size_t i) {
    float most = best[i];
    for (std::size_t row = 0; row < kRows; ++row) most = larger(rows[row * count + i], most);
    best[i] = most;
  };
  for (; row_count >= kRows; row_count -= kRows, rows += kRows * count) {
    std::size_t begin = 0;
    for (; begin + kColumns <= count; begin += kColumns) {
      for (std::size_t row = 0; row < kRows; ++row) __builtin_prefetch(rows + row * count + begin + kAhead);
      for (std::size_t i = begin; i < begin + kColumns; ++i) raise(i);
    }
    for (std::size_t i = begin; i < count; ++i) raise(i);
  }
  for (; row_count > 0; --row_count, rows += count)
    for (std::size_t i = 0; i < count; ++i) best[i] = larger(rows[i], best[i]);
}

struct Candidate {
  float x1, y1, x2, y2, score;
  std::int64_t class_id, cell;
};

// The cells whose best class is at or above the threshold, with boxes that have an area. Returns false if
// there are more than suppression takes.
bool candidates_of(const tandem_decode_call& call, std::vector<Candidate>& candidates) {
  const std::size_t cells = call.cells;
  const float* scores = call.head + 4 * cells;
  std::vector<float> best(scores, scores + cells);
  raise_to(best.data(), scores + cells, call.classes - 1, cells);
  std::vector<std::size_t> chosen;
  for (std::size_t cell = 0; cell < cells; ++cell)
    if (best[cell] >= call.score_threshold && best[cell] < std::numeric_limits<float>::infinity())
      chosen.push_back(cell);
  // Class by class: the reads of several cells do not wait for each other.
  std::vector<std::int64_t> class_ids(chosen.size(), -1);
  std::vector<char> has_nan(chosen.size(), 0);
  for (std::size_t one = 0; one < call.classes; ++one)
    for (std::size_t i = 0; i < chosen.size(); ++i) {
      const float score = scores[one * cells + chosen[i]];
      if (score == best[chosen[i]] && class_ids[i] < 0) class_ids[i] = static_cast<std::int64_t>(one);
      has_nan[i] |= std::isnan(score);
    }
  std::size_t count = 0;
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    if (has_nan[i]) continue;
    ++count;
    const float* box = call.head + chosen[i];
    const float half_width = box[2 * cells] * 0.5f, half_height = box[3 * cells] * 0.5f;
    const Candidate one{box[0] - half_width,     box[cells] - half_height,
                        box[0] + half_width,     box[cells] + half_height,
                        best[chosen[i]],         class_ids[i],
                        static_cast<std::int64_t>(chosen[i])};
    if (one.x2 > one.x1 && one.y2 > one.y1) candidates.push_back(one);
  }
  return count <= kMaxCandidates;
}

struct Rectangle {
  double x, y, width, height;
};

// OpenCV's `rectOverlap`, with its rounding to float.
float overlap_of(const Rectangle& a, const Rectangle& b) {
  const double areas = a.width * a.height + b.width * b.height;
  if (areas <= std::numeric_limits<double>::epsilon()) return 1.0f;
  double shared = 0.0;
  if (a.width > 0.0 && a.height > 0.0 && b.width > 0.0 && b.height > 0.0) {
    const Rectangle &left = a.x < b.x ? a : b, &right = a.x < b.x ? b : a;
    const Rectangle &upper = a.y < b.y ? a : b, &lower = a.y < b.y ? b : a;
    const double width = std::min(left.width - (right.x - left.x), right.width);
    const double height = std::min(upper.height - (lower.y - upper.y), lower.height);
    if (width > 0.0 && height > 0.0) shared = width * height;
  }
  return 1.0f - static_cast<float>(1.0 - shared / (areas - shared));
}

double clipped(float value) { return std::min(std::max(static_cast<double>(value), -kFar), kFar); }

// Keeps the best candidates, which are sorted, as `suppress` of nms.py: each class has a place of its own.
void suppress(std::vector<Candidate>& candidates, float max_iou, std::size_t limit) {
  double least = kFar, most = -kFar;
  for (const Candidate& one : candidates) {
    least = std::min({least, clipped(one.x1), clipped(one.y1)});
    most = std::max({most, clipped(one.x2), clipped(one.y2)});
  }
  const double span = most - least + 1.0;
  std::vector<Rectangle> winners;
  std::size_t count = 0;
  for (const Candidate& one : candidates) {
    const double offset = static_cast<double>(one.class_id) * span;
    const double x = clipped(one.x1) + offset, y = clipped(one.y1) + offset;
    const Rectangle place{x, y, clipped(one.x2) + offset - x, clipped(one.y2) + offset - y};
    const auto overlaps = [&](const Rectangle& winner) { return overlap_of(place, winner) > max_iou; };
    if (std::any_of(winners.begin(), winners.end(), overlaps)) continue;
    winners.push_back(place);
    candidates[count++] = one;
    if (count == limit) break;
  }
  candidates.resize(count);
}

float within(float value, float size) { return std::min(std::max(value, 0.0f), size); }

std::int64_t decoded(const tandem_decode_call& call) {
  std::vector<Candidate> candidates;
  if (call.classes == 0 || !candidates_of(call, candidates)) return -1;
  const auto better = [](const Candidate& one, const Candidate& other) { return one.score > other.score; };
  std::stable_sort(candidates.begin(), candidates.end(), better);
  if (call.max_iou >= 0.0f) suppress(candidates, call.max_iou, call.max_detections);
  std::int64_t count = 0;
  for (std::size_t i = 0; i < std::min(candidates.size(), call.max_detections); ++i) {
    const Candidate& one = candidates[i];
    const float x1 = within((one.x1 - call.pad_x) / call.scale_x, call.frame_width);
    const float y1 = within((one.y1 - call.pad_y) / call.scale_y, call.frame_height);
    const float x2 = within((one.x2 - call.pad_x) / call.scale_x, call.frame_width);
    const float y2 = within((one.y2 - call.pad_y) / call.scale_y, call.frame_height);
    if (!(x2 > x1 && y2 > y1)) continue;
    const float frame[] = {x1, y1, x2, y2}, input[] = {one.x1, one.y1, one.x2, one.y2};
    std::copy_n(frame, 4, call.boxes + 4 * count);
    std::copy_n(input, 4, call.input_boxes + 4 * count);
    call.scores[count] = one.score;
    call.class_ids[count] = one.class_id;
    call.places[count] = one.cell;
    ++count;
  }
  return count;
}

}  // namespace

int tandem_stages_version(void) { return TANDEM_STAGES_VERSION; }

void tandem_stages_planes(const tandem_planes_call* call) {
  const Channels to(*call);
  for (std::size_t y = 0; y < call->rows; ++y) {
    const std::size_t at = y * call->row_stride;
    normalise_row(call->pixels + y * call->pixel_stride, call->columns, to.planes[0] + at, to.planes[1] + at,
                  to.planes[2] + at, to.factors, to.shifts);
  }
}

void tandem_stages_planes_nv12(const tandem_planes_call* call, const std::uint8_t* chroma) {
  constexpr std::size_t kBlock = 1024;  // columns
  int blue[kBlock], green[kBlock], red[kBlock];
  const Channels to(*call);
  for (std::size_t y = 0; y < call->rows; ++y)
    for (std::size_t x = 0; x < call->columns; x += kBlock) {
      const std::size_t columns = std::min(kBlock, call->columns - x), at = y * call->row_stride + x;
      if (y % 2 == 0 || call->columns > kBlock)
        chroma_row(chroma + y / 2 * call->pixel_stride + x, (columns + 1) / 2 * 2, blue, green, red);
      normalise_nv12_row(call->pixels + y * call->pixel_stride + x, columns, blue, green, red,
                         to.planes[0] + at, to.planes[1] + at, to.planes[2] + at, to.factors, to.shifts);
    }
}

std::int64_t tandem_stages_decode(const tandem_decode_call* call) {
  try {
    return decoded(*call);
  } catch (const std::bad_alloc&) {
    return -1;
  }
}
