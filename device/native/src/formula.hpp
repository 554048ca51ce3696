// Sizes that dynamic dimensions decide: a number, or a formula such as "4*d0*((d1+1)//2)".
#pragma once
#include <string>
#include <vector>

#include "text.hpp"

namespace tandem::internal {

struct Amount {
  bool is_formula = false;
  Int number = 0;
  std::string formula;
};

// The value where dimension i is point[i]. Throws EngineError: no formula, an unknown dimension, a
// divisor below 1, or a value beyond 2^62.
Int evaluate(const Amount& amount, const std::vector<Int>& point);

}  // namespace tandem::internal
