// ByteTrack on arrays: the operations of pipelines/stages/track.py, track_assign.py and track_kalman.py, in
// their order and their precision. Built without contraction of products and sums.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <new>
#include <queue>
#include <utility>
#include <vector>

#include "tandem_stages.h"

namespace {

constexpr double kStepSeconds = 1.0 / 30.0, kPositionNoise = 1.0 / 20.0, kVelocityNoise = 1.0 / 160.0;
constexpr float kSecondIou = 0.5f, kTentativeIou = 0.3f, kSameIou = 0.85f;
enum Status : std::int8_t { kNew, kSeen, kLost };

using Index = std::int32_t;
using Rows = std::vector<Index>;
constexpr Index kNone = -1;

struct Box {
  float x1, y1, x2, y2;
};

float area_of(const Box& box) { return (box.x2 - box.x1) * (box.y2 - box.y1); }

float iou_of(const Box& first, const Box& second) {
  const float width = std::min(first.x2, second.x2) - std::max(first.x1, second.x1);
  const float height = std::min(first.y2, second.y2) - std::max(first.y1, second.y1);
  const float shared = std::max(width, 0.0f) * std::max(height, 0.0f);
  return shared / ((area_of(first) + 1e-9f) + area_of(second) - shared);
}

bool is_finite(const Box& box) {
  return std::isfinite(box.x1) && std::isfinite(box.y1) && std::isfinite(box.x2) && std::isfinite(box.y2);
}

double square(double value) { return value * value; }

// The best matching of rows and columns over the edges that exist: `_Matching` of track_assign.py, which
// explains the algorithm.
class Matching {
 public:
  using Edges = std::vector<std::pair<Index, double>>;

  Matching(std::size_t rows, std::size_t columns)
      : edges(rows), column_of(rows, kNone), row_of_(columns, kNone), high_(rows), price_(columns, 0.0),
        row_distance_(rows, kUnknown), column_distance_(columns, kUnknown), reached_from_(columns, kNone) {}

  std::vector<Edges> edges;
  Rows column_of;

  void solve() {
    for (std::size_t row = 0; row < edges.size(); ++row)
      for (const auto& [column, gain] : edges[row]) high_[row] = std::max(high_[row], gain);
    for (std::size_t row = 0; row < edges.size(); ++row)
      if (!edges[row].empty()) add(static_cast<Index>(row));
  }

 private:
  static constexpr double kUnknown = -1.0;  // distances are never negative

  bool is_reached(Index column) const {
    return row_of_[column] != kNone && row_distance_[row_of_[column]] != kUnknown;
  }

  void add(Index start) {
    Rows reached_rows{start}, reached_columns;
    std::priority_queue<std::pair<double, Index>, std::vector<std::pair<double, Index>>, std::greater<>> queue;
    row_distance_[start] = 0.0;
    double best = high_[start];
    Index freed_row = start, free_column = kNone;  // so far: it stays alone
    for (Index row = start; row != kNone;) {
      for (const auto& [column, gain] : edges[row]) {
        if (is_reached(column)) continue;
        const double slack = high_[row] + price_[column] - gain;
        const double distance = row_distance_[row] + std::max(0.0, slack);
        const bool is_first = column_distance_[column] == kUnknown;
        if (!(distance < (is_first ? best : column_distance_[column]))) continue;
        if (is_first) reached_columns.push_back(column);
        column_distance_[column] = distance;
        reached_from_[column] = row;
        queue.emplace(distance, column);
      }
      while (!queue.empty() && is_reached(queue.top().second)) queue.pop();
      if (queue.empty() || queue.top().first >= best) break;
      const auto [distance, column] = queue.top();
      queue.pop();
      row = row_of_[column];
      if (row == kNone) {
        best = distance, freed_row = kNone, free_column = column;
      } else {
        row_distance_[row] = distance;
        reached_rows.push_back(row);
        if (distance + high_[row] < best) best = distance + high_[row], freed_row = row;
      }
    }
    for (const Index row : reached_rows) {
      high_[row] -= std::max(0.0, best - row_distance_[row]);
      row_distance_[row] = kUnknown;
    }
    for (const Index column : reached_columns) {
      price_[column] += std::max(0.0, best - column_distance_[column]);
      column_distance_[column] = kUnknown;
    }
    if (freed_row == start) return;
    Index last = free_column;
    if (last == kNone) last = std::exchange(column_of[freed_row], kNone);
    exchange(start, last);
  }

  // Matches each row of a path, from its last column back to `start`, to the next column.
  void exchange(Index start, Index column) {
    while (true) {
      const Index row = reached_from_[column];
      const Index before = column_of[row];
      column_of[row] = column, row_of_[column] = row;
      if (row == start) return;
      column = before;
    }
  }

  Rows row_of_;
  std::vector<double> high_, price_, row_distance_, column_distance_;
  Rows reached_from_;
};

// The place of the first largest number, and the largest of the others and 0.
struct Best {
  Index place = 0;
  float value = 0.0f, next = 0.0f;

  void add(Index other, float gain) {
    if (gain > value)
      next = value, value = gain, place = other;
    else
      next = std::max(next, gain);
  }
};

// `assign` of track_assign.py: the matching of `rows` and `columns` with the largest sum of weights above
// `least`, into `row_of` by column.
template <typename Weight>
void assign(const Rows& rows, const Rows& columns, float least, Weight weight, Rows& row_of) {
  if (rows.empty() || columns.empty()) return;
  std::vector<float> gains(rows.size() * columns.size());
  std::vector<Best> of_row(rows.size()), of_column(columns.size());
  for (std::size_t i = 0, at = 0; i < rows.size(); ++i)
    for (std::size_t k = 0; k < columns.size(); ++k, ++at) {
      gains[at] = std::max(weight(rows[i], columns[k]) - least, 0.0f);
      if (gains[at] == 0.0f) continue;
      of_row[i].add(static_cast<Index>(k), gains[at]);
      of_column[k].add(static_cast<Index>(i), gains[at]);
    }
  std::vector<char> column_open(columns.size(), 1);
  Rows open_rows;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const Best& best = of_row[i];
    if (best.value == 0.0f) continue;
    const Best& rival = of_column[best.place];
    // A best matching has such a pair, whatever becomes of the rest.
    if (rival.place == static_cast<Index>(i) && best.value >= best.next + rival.next) {
      column_open[best.place] = 0;
      row_of[columns[best.place]] = rows[i];
    } else {
      open_rows.push_back(static_cast<Index>(i));
    }
  }
  if (open_rows.empty()) return;
  Matching matching(open_rows.size(), columns.size());
  for (std::size_t i = 0; i < open_rows.size(); ++i)
    for (std::size_t k = 0; k < columns.size(); ++k) {
      const float gain = gains[open_rows[i] * columns.size() + k];
      if (gain > 0.0f && column_open[k]) matching.edges[i].emplace_back(static_cast<Index>(k), gain);
    }
  matching.solve();
  for (std::size_t i = 0; i < open_rows.size(); ++i)
    if (matching.column_of[i] != kNone) row_of[columns[matching.column_of[i]]] = rows[open_rows[i]];
}

// The tracks of a call, by rows.
class Frame {
 public:
  Frame(tandem_tracks& tracks, const tandem_tracker& config, double time_s)
      : tracks_(tracks), config_(config), time_s_(time_s) {}

  std::int64_t run(const Box* boxes, const float* scores, const std::int64_t* class_ids, std::size_t count,
                   std::int64_t* ids, std::uint8_t* stays) {
    Rows alive;
    for (std::size_t row = 0; row < tracks_.count; ++row)
      if (tracks_.seen_s[row] >= time_s_ - config_.lost_s) alive.push_back(static_cast<Index>(row));
    const double steps = alive.empty() ? 0.0 : std::max(0.0, time_s_ - tracks_.at_s) / kStepSeconds;
    std::vector<Box> places;
    for (const Index row : alive) places.push_back(box_of(row, steps));
    const auto is_bad = [](const Box& box) { return !is_finite(box); };
    if (std::any_of(places.begin(), places.end(), is_bad) || std::any_of(boxes, boxes + count, is_bad)) return -1;
    if (!std::all_of(scores, scores + count, [](float score) { return std::isfinite(score); })) return -1;
    std::vector<float> ious(alive.size() * count);
    for (std::size_t i = 0, at = 0; i < alive.size(); ++i)
      for (std::size_t k = 0; k < count; ++k, ++at) {
        ious[at] = iou_of(places[i], boxes[k]);
        if (!std::isfinite(ious[at])) return -1;
        if (config_.same_class && tracks_.class_ids[alive[i]] != class_ids[k]) ious[at] = 0.0f;
      }
    Rows row_of(count, kNone);
    associate(alive, ious, scores, row_of);
    std::vector<char> is_lost(alive.size(), 1);
    places.reserve(alive.size() + count);
    // Nothing may fail from here on.
    for (std::size_t row = 0; row < alive.size(); ++row) {
      move(alive[row], row);
      predict(row, steps);
    }
    tracks_.count = alive.size();
    tracks_.at_s = time_s_;
    const std::int64_t staying = see(boxes, scores, class_ids, row_of, is_lost, ids, stays);
    forget(places);
    return staying;
  }

 private:
  // One coordinate of a track: what its five planes hold.
  struct Coordinate {
    double &position, &velocity, &var_p, &cov_pv, &var_v;
  };

  double& state(std::size_t plane, std::size_t row, std::size_t column) const {
    return tracks_.states[(plane * tracks_.capacity + row) * 4 + column];
  }

  Coordinate coordinate(std::size_t row, std::size_t column) const {
    return {state(0, row, column), state(1, row, column), state(2, row, column), state(3, row, column),
            state(4, row, column)};
  }

  static Box corners_of(double x, double y, double width, double height) {
    const double half_width = 0.5 * std::max(width, 1.0), half_height = 0.5 * std::max(height, 1.0);
    return {static_cast<float>(x - half_width), static_cast<float>(y - half_height),
            static_cast<float>(x + half_width), static_cast<float>(y + half_height)};
  }

  // Where a track is after so many steps.
  Box box_of(std::size_t row, double steps) const {
    const auto at = [&](std::size_t column) { return state(0, row, column) + steps * state(1, row, column); };
    return corners_of(at(0), at(1), at(2), at(3));
  }

  // Width or height, at least a pixel: a box keeps some noise.
  double size_of(std::size_t row, std::size_t column) const {
    return std::max(state(0, row, 2 + column % 2), 1.0);
  }

  void predict(std::size_t row, double steps) const {
    const double sizes[] = {size_of(row, 0), size_of(row, 1)};
    for (std::size_t column = 0; column < 4; ++column) {
      const double size = sizes[column % 2];
      auto [position, velocity, var_p, cov_pv, var_v] = coordinate(row, column);
      position += steps * velocity;
      var_p += steps * (2.0 * cov_pv + steps * var_v);
      var_p += steps * square(kPositionNoise * size);
      cov_pv += steps * var_v;
      var_v += steps * square(kVelocityNoise * size);
    }
  }

  static void measure(const Box& box, double (&measured)[4]) {
    measured[2] = box.x2 - box.x1;
    measured[3] = box.y2 - box.y1;
    measured[0] = box.x1 + 0.5 * measured[2];
    measured[1] = box.y1 + 0.5 * measured[3];
  }

  void update(std::size_t row, const Box& box) const {
    double measured[4];
    measure(box, measured);
    const double sizes[] = {size_of(row, 0), size_of(row, 1)};
    for (std::size_t column = 0; column < 4; ++column) {
      auto [position, velocity, var_p, cov_pv, var_v] = coordinate(row, column);
      const double variance = var_p + square(kPositionNoise * sizes[column % 2]);
      const double gain_p = var_p / variance, gain_v = cov_pv / variance;
      const double error = measured[column] - position;
      position += gain_p * error;
      velocity += gain_v * error;
      var_v -= gain_v * cov_pv;
      var_p -= gain_p * var_p;
      cov_pv -= gain_p * cov_pv;
    }
  }

  void start(std::size_t row, const Box& box, float score, std::int64_t class_id) const {
    double measured[4];
    measure(box, measured);
    for (std::size_t column = 0; column < 4; ++column) {
      const double size = std::max(measured[2 + column % 2], 1.0);
      auto [position, velocity, var_p, cov_pv, var_v] = coordinate(row, column);
      position = measured[column], velocity = 0.0, cov_pv = 0.0;
      var_p = square(2.0 * kPositionNoise * size);
      var_v = square(10.0 * kVelocityNoise * size);
    }
    tracks_.ids[row] = -1;
    tracks_.class_ids[row] = class_id;
    tracks_.scores[row] = score;
    tracks_.status[row] = kNew;
    tracks_.seen_s[row] = time_s_;
    tracks_.hits[row] = 1;
    confirm(row);
  }

  void confirm(std::size_t row) const {
    if (tracks_.status[row] != kNew || tracks_.hits[row] < config_.confirm_frames) return;
    tracks_.ids[row] = tracks_.next_id++;
    tracks_.status[row] = kSeen;
  }

  // Three rounds of falling confidence; rows are numbers in `alive`.
  void associate(const Rows& alive, const std::vector<float>& ious, const float* scores, Rows& row_of) const {
    const std::size_t count = row_of.size();
    const auto iou = [&](Index row, Index column) { return ious[row * count + column]; };
    const auto weight = [&](Index row, Index column) { return iou(row, column) * scores[column]; };
    const auto of_status = [&](auto fits) {
      Rows rows;
      for (std::size_t row = 0; row < alive.size(); ++row)
        if (fits(tracks_.status[alive[row]])) rows.push_back(static_cast<Index>(row));
      return rows;
    };
    const auto with_scores = [&](float least, float below) {
      Rows columns;
      for (std::size_t column = 0; column < count; ++column)
        if (scores[column] >= least && !(scores[column] >= below) && row_of[column] == kNone)
          columns.push_back(static_cast<Index>(column));
      return columns;
    };
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    const auto is_sure = [](std::int8_t status) { return status != kNew; };
    assign(of_status(is_sure), with_scores(config_.high_score, kInfinity), config_.iou, weight, row_of);
    std::vector<char> is_free(alive.size(), 1);
    for (const Index row : row_of)
      if (row != kNone) is_free[row] = 0;
    Rows seen = of_status([](std::int8_t status) { return status == kSeen; });
    seen.erase(std::remove_if(seen.begin(), seen.end(), [&](Index row) { return !is_free[row]; }), seen.end());
    assign(seen, with_scores(config_.low_score, config_.high_score), kSecondIou, iou, row_of);
    const auto is_new = [](std::int8_t status) { return status == kNew; };
    assign(of_status(is_new), with_scores(config_.high_score, kInfinity), kTentativeIou, iou, row_of);
  }

  std::int64_t see(const Box* boxes, const float* scores, const std::int64_t* class_ids, const Rows& row_of,
                   std::vector<char>& is_lost, std::int64_t* ids, std::uint8_t* stays) const {
    for (std::size_t column = 0; column < row_of.size(); ++column) {
      const Index row = row_of[column];
      if (row == kNone) continue;
      is_lost[row] = 0;
      update(row, boxes[column]);
      tracks_.scores[row] = scores[column];
      tracks_.class_ids[row] = class_ids[column];
      tracks_.seen_s[row] = time_s_;
      ++tracks_.hits[row];
      if (tracks_.status[row] != kNew) tracks_.status[row] = kSeen;
    }
    for (std::size_t row = 0; row < is_lost.size(); ++row) {
      if (is_lost[row]) {
        tracks_.status[row] = kLost;
        state(1, row, 2) = state(1, row, 3) = 0.0;
      }
      confirm(row);
    }
    std::int64_t staying = 0;
    for (std::size_t column = 0; column < row_of.size(); ++column) {
      const Index row = row_of[column];
      ids[column] = row == kNone ? -1 : tracks_.ids[row];
      stays[column] = row != kNone || scores[column] >= config_.high_score;
      staying += stays[column];
      if (row != kNone || !(scores[column] >= config_.start_score)) continue;
      start(tracks_.count, boxes[column], scores[column], class_ids[column]);
      ids[column] = tracks_.ids[tracks_.count++];
    }
    return staying;
  }

  // Drops the tracks that were lost before they had a number, and lost ones in whose place another is seen.
  // `places` is overwritten; it has room for all tracks.
  void forget(std::vector<Box>& places) const {
    places.clear();
    for (std::size_t row = 0; row < tracks_.count; ++row)
      if (tracks_.status[row] != kLost) places.push_back(box_of(row, 0.0));
    std::size_t count = 0;
    for (std::size_t row = 0; row < tracks_.count; ++row) {
      if (tracks_.status[row] == kLost) {
        const Box box = box_of(row, 0.0);
        const auto is_same = [&](const Box& place) { return iou_of(box, place) > kSameIou; };
        if (tracks_.ids[row] < 0 || std::any_of(places.begin(), places.end(), is_same)) continue;
      }
      move(row, count++);
    }
    tracks_.count = count;
  }

  void move(std::size_t from, std::size_t to) const {
    if (from == to) return;
    for (std::size_t plane = 0; plane < 5; ++plane)
      std::copy_n(&state(plane, from, 0), 4, &state(plane, to, 0));
    tracks_.ids[to] = tracks_.ids[from];
    tracks_.class_ids[to] = tracks_.class_ids[from];
    tracks_.hits[to] = tracks_.hits[from];
    tracks_.scores[to] = tracks_.scores[from];
    tracks_.status[to] = tracks_.status[from];
    tracks_.seen_s[to] = tracks_.seen_s[from];
  }

  tandem_tracks& tracks_;
  const tandem_tracker& config_;
  double time_s_;
};

}  // namespace

std::int64_t tandem_stages_track(tandem_tracks* tracks, const tandem_tracker* config, const float* boxes,
                                 const float* scores, const std::int64_t* class_ids, std::size_t count,
                                 double time_s, std::int64_t* ids, std::uint8_t* stays) {
  try {
    const auto* rows = reinterpret_cast<const Box*>(boxes);
    return Frame(*tracks, *config, time_s).run(rows, scores, class_ids, count, ids, stays);
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

std::int64_t tandem_stages_follow(const tandem_decode_call* call, tandem_tracks* tracks,
                                  const tandem_tracker* config, double time_s, std::int64_t* ids,
                                  std::int64_t* decoded_ns) {
  const std::int64_t decoded = tandem_stages_decode(call);
  *decoded_ns = std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
  if (decoded < 0) return decoded;
  const auto count = static_cast<std::size_t>(decoded);
  if (tracks->count + count > tracks->capacity) return -1;
  try {
    std::vector<std::uint8_t> stays(count);
    const std::int64_t staying = tandem_stages_track(tracks, config, call->boxes, call->scores, call->class_ids, count,
                                                     time_s, ids, stays.data());
    if (staying < 0 || staying == decoded) return staying;
    for (std::size_t from = 0, to = 0; from < count; ++from) {
      if (!stays[from]) continue;
      std::copy_n(call->boxes + 4 * from, 4, call->boxes + 4 * to);
      std::copy_n(call->input_boxes + 4 * from, 4, call->input_boxes + 4 * to);
      call->scores[to] = call->scores[from];
      call->class_ids[to] = call->class_ids[from];
      call->places[to] = call->places[from];
      ids[to++] = ids[from];
    }
    return staying;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}
