// Plans that `tandem-agent prepare` finished on this board. device/runtime/tensorrt/plans.py writes the store, and
// says what lies in it; here it is read by the same rules.
#pragma once
#include <string>

#include "engine.hpp"

namespace tandem::internal {

struct Board {
  std::string tensorrt, dla_compiler, l4t, soc;
  int dla_cores = 0;
  std::string power_mode;
};

// What a plan depends on, of the board whose file system begins at `root`.
Board read_board(const std::string& root, const std::string& tensorrt);

// The name of a segment's plan: the digest of the board and of all that it is made from. Throws SessionError: no
// form of the segment is for this TensorRT.
std::string plan_key(Engine& engine, const TensorRT& part, const Board& board);

struct FinishedPlan {
  std::string bytes;
  bool fallback;  // built with GPU fallback, all layers on the DLA
};

// The plan of a segment for this board, checked against its record. Throws SessionError: there is none, why.
FinishedPlan read_plan(Engine& engine, const TensorRT& part, const std::string& tensorrt);

}  // namespace tandem::internal
