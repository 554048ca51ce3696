// Runs stages for a program of another architecture. A request on stdin is the number of a stage, its scalars
// and its blocks of memory; the answer on stdout is the result and the blocks as they are then. The first block is
// the stage's struct, whose pointers are numbers of blocks, 0 for none.
#include <tandem_stages.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <vector>

namespace {

using Bytes = std::vector<unsigned char>;

template <typename T>
T taken() {
  T value;
  if (std::fread(&value, sizeof value, 1, stdin) != 1) std::exit(0);
  return value;
}

struct Request {
  std::vector<Bytes> blocks;

  template <typename T>
  T* block(std::size_t number) {
    return reinterpret_cast<T*>(blocks[number].data());
  }

  template <typename T>
  void point(T*& pointer) {
    pointer = block<T>(reinterpret_cast<std::size_t>(pointer));
  }
};

void planes(Request& request, bool is_nv12) {
  auto* call = request.block<tandem_planes_call>(0);
  request.point(call->pixels), request.point(call->planes);
  if (is_nv12)
    tandem_stages_planes_nv12(call, request.block<std::uint8_t>(3));
  else
    tandem_stages_planes(call);
}

tandem_decode_call* decode_call(Request& request) {
  auto* call = request.block<tandem_decode_call>(0);
  request.point(call->head);
  for (auto* pointer : {&call->boxes, &call->input_boxes, &call->scores}) request.point(*pointer);
  for (auto* pointer : {&call->class_ids, &call->places}) request.point(*pointer);
  return call;
}

tandem_tracks* tracks_of(Request& request, std::size_t block) {
  auto* tracks = request.block<tandem_tracks>(block);
  request.point(tracks->states), request.point(tracks->seen_s);
  for (auto* pointer : {&tracks->ids, &tracks->class_ids, &tracks->hits}) request.point(*pointer);
  request.point(tracks->scores), request.point(tracks->status);
  return tracks;
}

std::int64_t track(Request& request, std::size_t count, double time_s) {
  return tandem_stages_track(tracks_of(request, 0), request.block<tandem_tracker>(8), request.block<float>(9),
                             request.block<float>(10), request.block<std::int64_t>(11), count, time_s,
                             request.block<std::int64_t>(12), request.block<std::uint8_t>(13));
}

std::int64_t follow(Request& request, double time_s) {
  return tandem_stages_follow(decode_call(request), tracks_of(request, 14), request.block<tandem_tracker>(15),
                              time_s, request.block<std::int64_t>(16), request.block<std::int64_t>(17));
}

}  // namespace

int main() {
  for (;;) {
    const auto stage = taken<std::int64_t>();
    const auto count = static_cast<std::size_t>(taken<std::int64_t>());
    const auto time_s = taken<double>();
    Request request;
    request.blocks.resize(static_cast<std::size_t>(taken<std::int64_t>()));
    for (Bytes& block : request.blocks) {
      block.resize(static_cast<std::size_t>(taken<std::int64_t>()));
      if (std::fread(block.data(), 1, block.size(), stdin) != block.size()) return 1;
    }
    std::int64_t result = 0;
    if (stage < 2) planes(request, stage == 1);
    if (stage == 2) result = tandem_stages_decode(decode_call(request));
    if (stage == 3) result = track(request, count, time_s);
    if (stage == 4) result = follow(request, time_s);
    std::fwrite(&result, sizeof result, 1, stdout);
    for (const Bytes& block : request.blocks) std::fwrite(block.data(), 1, block.size(), stdout);
    std::fflush(stdout);
  }
}
