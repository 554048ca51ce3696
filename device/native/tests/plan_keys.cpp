// Prints the name of each DLA segment's plan in the store, for a board whose file system begins at ROOT:
//
//   plan_keys ENGINE ROOT TENSORRT
#include <cstdio>

#include "../src/plans.hpp"

int main(int count, char** words) try {
  if (count != 4) return std::fprintf(stderr, "usage: plan_keys ENGINE ROOT TENSORRT\n"), 2;
  using namespace tandem::internal;
  Engine engine(words[1]);
  const Board board = read_board(words[2], words[3]);
  for (const Segment& segment : engine.manifest().segments)
    for (const Implementation& implementation : segment.implementations)
      if (const auto* part = std::get_if<TensorRT>(&implementation))
        std::printf("%s\n", plan_key(engine, *part, board).c_str());
  return 0;
} catch (const std::runtime_error& error) {
  std::printf("error: %s\n", error.what());
  return 1;
}
