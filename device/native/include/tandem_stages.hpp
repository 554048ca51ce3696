// From a camera's picture to tracked objects in C++17, over tandem_stages.h. Failures are exceptions.
#pragma once
#include <algorithm>
#include <initializer_list>

#include "tandem.hpp"
#include "tandem_stages.h"

namespace tandem {

// NV12 or YUYV in the memory of somebody else. Width and height are even; `stride`: bytes from row to row.
struct CameraPicture {
  const std::uint8_t* bytes;
  std::size_t width, height, stride;
  bool is_yuyv;
};

// An engine's input of float32 [1, 3, height, width], which is RGB from 0 to 1: the picture in the middle of grey. One
// that is larger than the input is made smaller by a whole number, by means.
class PictureInput {
 public:
  PictureInput(const TensorInfo& info, std::size_t picture_width, std::size_t picture_height)
      : name_(info.name), shape_(info.shape), picture_width_(picture_width), picture_height_(picture_height) {
    const bool has_planes = info.dtype == TANDEM_FLOAT32 && shape_.size() == 4 && shape_[0] == 1 && shape_[1] == 3;
    if (!has_planes || std::min(shape_[2], shape_[3]) < 2)
      throw std::invalid_argument(name_ + " is no float32 [1, 3, height, width] of fixed sizes");
    if (std::min(picture_width, picture_height) < 2 || picture_width % 2 || picture_height % 2)
      throw std::invalid_argument("a picture has " + std::to_string(picture_width) + "x" +
                                  std::to_string(picture_height) + " pixels; give even sizes");
    const std::size_t across = (picture_width + width() - 1) / width();
    const std::size_t down = (picture_height + height() - 1) / height();
    factor_ = std::max(across, down);
    inner_width_ = picture_width / factor_ / 2 * 2, inner_height_ = picture_height / factor_ / 2 * 2;
    if (std::min(inner_width_, inner_height_) == 0)
      throw std::invalid_argument("a picture of " + std::to_string(picture_width) + "x" +
                                  std::to_string(picture_height) + " pixels leaves none in " + std::to_string(width()) +
                                  "x" + std::to_string(height()));
    left_ = (width() - inner_width_) / 2, top_ = (height() - inner_height_) / 2;
    values_.assign(3 * width() * height(), 114 / 255.0f);
    pixels_.resize(inner_width_ * inner_height_ * 3 / 2);
  }

  // The tensor for `Session::infer`, valid until the next call.
  Tensor write(const CameraPicture& picture) {
    if (picture.width != picture_width_ || picture.height != picture_height_)
      throw std::invalid_argument("the size of the pictures changed");
    const std::size_t stride = picture.stride, step = picture.is_yuyv ? 4 : 2;
    const std::size_t down = picture.is_yuyv ? 2 * factor_ : factor_;
    const std::uint8_t* u = picture.is_yuyv ? picture.bytes + 1 : picture.bytes + stride * picture.height;
    const std::uint8_t* v = picture.is_yuyv ? picture.bytes + 3 : u + 1;
    std::uint8_t* chroma = pixels_.data() + inner_width_ * inner_height_;
    shrink(picture.bytes, picture.is_yuyv ? 2 : 1, stride, factor_, pixels_.data(), 1, inner_width_, inner_height_);
    shrink(u, step, stride, down, chroma, 2, inner_width_ / 2, inner_height_ / 2);
    shrink(v, step, stride, down, chroma + 1, 2, inner_width_ / 2, inner_height_ / 2);
    constexpr float kScale = 1 / 255.0f;
    const tandem_planes_call call = {
        pixels_.data(), values_.data() + top_ * width() + left_, {kScale, kScale, kScale}, {}, inner_height_,
        inner_width_, inner_width_, width(), width() * height(), 1};
    tandem_stages_planes_nv12(&call, chroma);
    return Tensor::of(name_, values_.data(), shape_);
  }

  std::size_t width() const noexcept { return static_cast<std::size_t>(shape_[3]); }
  std::size_t height() const noexcept { return static_cast<std::size_t>(shape_[2]); }

  // What a box of the input needs to become one of the picture.
  void place(tandem_decode_call& call) const noexcept {
    call.scale_x = call.scale_y = 1.0f / static_cast<float>(factor_);
    call.pad_x = static_cast<float>(left_), call.pad_y = static_cast<float>(top_);
    call.frame_width = static_cast<float>(picture_width_), call.frame_height = static_cast<float>(picture_height_);
  }

 private:
  // Means of factor_ x `down` samples, which lie `step` bytes apart; results lie `gap` apart.
  void shrink(const std::uint8_t* from, std::size_t step, std::size_t stride, std::size_t down, std::uint8_t* to,
              std::size_t gap, std::size_t columns, std::size_t rows) const {
    const std::size_t count = factor_ * down;
    for (std::size_t y = 0; y < rows; ++y)
      for (std::size_t x = 0; x < columns; ++x, to += gap) {
        std::size_t sum = count / 2;
        for (std::size_t i = 0; i < down; ++i)
          for (std::size_t j = 0; j < factor_; ++j) sum += from[(y * down + i) * stride + (x * factor_ + j) * step];
        *to = static_cast<std::uint8_t>(sum / count);
      }
  }

  std::string name_;
  std::vector<std::int64_t> shape_;
  std::size_t picture_width_, picture_height_, factor_, inner_width_, inner_height_, left_, top_;
  std::vector<float> values_;
  std::vector<std::uint8_t> pixels_;  // NV12
};

// A head of tandem_decode_call from distances [1, 4, cells], left, top, right and bottom of the cells' centres in
// cells, and scores [1, classes, cells]: of grids whose cells have these sizes in pixels, one after the other.
inline std::vector<float> head_of_distances(const Tensor& distances, const Tensor& scores, const PictureInput& input,
                                            std::initializer_list<std::size_t> sizes = {8, 16, 32}) {
  std::size_t cells = 0;
  for (const std::size_t size : sizes) cells += (input.width() / size) * (input.height() / size);
  if (cells == 0 || distances.size() != 4 * cells || scores.size() % cells != 0)
    throw std::invalid_argument(distances.name + " and " + scores.name + " are no distances [1, 4, " +
                                std::to_string(cells) + "] and scores [1, classes, " + std::to_string(cells) + "]");
  const float *sides = distances.as<float>(), *first_score = scores.as<float>();
  std::vector<float> head(4 * cells);
  float* to = head.data();
  for (const std::size_t pixels : sizes)
    for (std::size_t y = 0; y < input.height() / pixels; ++y)
      for (std::size_t x = 0; x < input.width() / pixels; ++x, ++to, ++sides) {
        const auto size = static_cast<float>(pixels);
        const float left = sides[0], top = sides[cells], right = sides[2 * cells], bottom = sides[3 * cells];
        to[0] = (static_cast<float>(x) + 0.5f + (right - left) / 2) * size;
        to[cells] = (static_cast<float>(y) + 0.5f + (bottom - top) / 2) * size;
        to[2 * cells] = (left + right) * size;
        to[3 * cells] = (top + bottom) * size;
      }
  head.insert(head.end(), first_score, first_score + scores.size());
  return head;
}

// Objects of one picture, best first. Boxes [size, 4]: x1, y1, x2, y2 in its pixels.
struct Detections {
  std::vector<float> boxes, scores;
  std::vector<std::int64_t> class_ids;
  std::size_t size() const noexcept { return scores.size(); }
};

// `head`: see tandem_decode_call, for which an output of Ultralytics is one.
inline Detections decode(const float* head, std::size_t classes, std::size_t cells, const PictureInput& input,
                         float score_threshold = 0.35f, float max_iou = 0.5f, std::size_t most = 100) {
  Detections found{std::vector<float>(4 * most), std::vector<float>(most), std::vector<std::int64_t>(most)};
  std::vector<float> input_boxes(4 * most);
  std::vector<std::int64_t> places(most);
  tandem_decode_call call = {};
  call.head = head, call.classes = classes, call.cells = cells, call.max_detections = most;
  call.score_threshold = score_threshold, call.max_iou = max_iou;
  call.boxes = found.boxes.data(), call.input_boxes = input_boxes.data(), call.scores = found.scores.data();
  call.class_ids = found.class_ids.data(), call.places = places.data();
  input.place(call);
  const std::int64_t count = tandem_stages_decode(&call);
  if (count < 0) throw std::runtime_error("the head has no classes, or more candidates than suppression takes");
  const auto size = static_cast<std::size_t>(count);
  found.boxes.resize(4 * size), found.scores.resize(size), found.class_ids.resize(size);
  return found;
}

struct TrackedObject {
  std::int64_t track, class_id;
  float score, x1, y1, x2, y2;
};

// The tracks of one camera, of which `capacity` fit.
class Tracker {
 public:
  explicit Tracker(const tandem_tracker& config = {0.5f, 0.1f, 0.6f, 0.1f, 1.0, 2, 1}, std::size_t capacity = 1000)
      : config_(config), states_(20 * capacity), seen_s_(capacity), ids_(capacity), class_ids_(capacity),
        hits_(capacity), scores_(capacity), status_(capacity), count_(0), at_s_(0.0), next_id_(1) {}

  // The objects that stay, in the order of the detections; `time_s` grows from picture to picture.
  std::vector<TrackedObject> update(const Detections& found, double time_s) {
    if (count_ + found.size() > ids_.size())
      throw std::runtime_error("there are more than " + std::to_string(ids_.size()) + " tracks: raise `capacity`");
    tandem_tracks tracks = {states_.data(), ids_.data(), class_ids_.data(), hits_.data(), scores_.data(),
                            status_.data(), seen_s_.data(), count_, ids_.size(), at_s_, next_id_};
    std::vector<std::int64_t> ids(found.size());
    std::vector<std::uint8_t> stays(found.size());
    if (tandem_stages_track(&tracks, &config_, found.boxes.data(), found.scores.data(), found.class_ids.data(),
                            found.size(), time_s, ids.data(), stays.data()) < 0)
      throw std::runtime_error("a box or a score is no finite number");
    count_ = tracks.count, at_s_ = tracks.at_s, next_id_ = tracks.next_id;
    std::vector<TrackedObject> objects;
    for (std::size_t i = 0; i < found.size(); ++i) {
      const float* box = found.boxes.data() + 4 * i;
      if (stays[i]) objects.push_back({ids[i], found.class_ids[i], found.scores[i], box[0], box[1], box[2], box[3]});
    }
    return objects;
  }

 private:
  tandem_tracker config_;
  std::vector<double> states_, seen_s_;
  std::vector<std::int64_t> ids_, class_ids_, hits_;
  std::vector<float> scores_;
  std::vector<std::int8_t> status_;
  std::size_t count_;
  double at_s_;
  std::int64_t next_id_;
};

}  // namespace tandem
