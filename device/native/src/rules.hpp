// The rules for a manifest; nothing of an engine is used before all of them hold.
#pragma once
#include <cmath>

#include "manifest.hpp"

namespace tandem::internal {

inline constexpr Int kMaxElements = (Int{1} << 31) - 1;  // of a tensor: kernels index with 32 bits

inline std::string list_text(const std::vector<Int>& values) {
  std::string text = "[";
  for (Int value : values) text += (text.size() > 1 ? ", " : "") + decimal(value);
  return text + "]";
}

inline bool above_zero(double value) { return std::isfinite(value) && value > 0; }

// The entry's bytes as a row of uint8. Throws EngineError if it is missing or another.
const Entry& blob_named(const Facts& facts, const std::string& name, const std::string& where);

// Bytes of a tensor whose dimensions are all numbers; nullopt of others.
std::optional<Int> fixed_bytes(const TensorInfo& tensor);

void check_cuda(const Facts& facts);
void check_tensorrt(const Facts& facts);
void check_tensorrt_gpu(const Facts& facts);
void check_frames(const Facts& facts);
void check_crossings(const Facts& facts);
void check_buffers(const Facts& facts);
void check_overlaps(const Facts& facts);

// Of kernels whose two tensors are not those of a segment; `point`: of their formulas.
void check_port_kernels(const Cuda& program, const Facts& facts, const std::string& where,
                        const std::vector<Int>& point);

}  // namespace tandem::internal
