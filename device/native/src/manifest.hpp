// The manifest of an engine: what it holds and how its parts fit together.
#pragma once
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <variant>
#include <vector>

#include "container.hpp"
#include "formula.hpp"

namespace tandem::internal {

inline constexpr int kFormatVersion = 1;
inline constexpr Int kArenaAlignment = 64;

// A number, the name of a dynamic dimension, or monostate where only a run tells the size.
using Dim = std::variant<std::monostate, Int, std::string>;

struct TensorInfo {
  std::string name;
  std::string dtype;
  std::vector<Dim> shape;
  std::optional<double> scale;
};

struct DimRange {
  std::string name;
  Int min, opt, max, step;
};

// -- the implementations of a segment ------------------------------------------------------------

struct Portable {
  std::string model;
  std::vector<std::string> weights;
};

struct CompiledKernel {
  std::string cubin, function;
  Int threads, shared_bytes;
  bool waits;
};

struct Argument {
  enum class Kind { workspace, weights, int32, null } kind;
  Amount amount;
};

struct Launch {
  Int kernel;
  Amount grid[3];
  std::vector<Argument> arguments;
};

struct Tactic {
  std::vector<Launch> launches;
};

struct TunableOp {
  std::vector<Tactic> tactics;
};

struct WorkspaceTensor {
  std::string tensor;
  Int offset, bytes;
  std::optional<std::vector<Amount>> shape;
};

struct Cuda {
  Int sm;
  std::vector<CompiledKernel> kernels;
  std::vector<TunableOp> works;
  std::string weights;
  Int workspace_bytes;
  std::vector<WorkspaceTensor> inputs, outputs;
  std::optional<Int> borders_at;

  std::vector<const WorkspaceTensor*> places() const;
};

struct Weight {
  std::string entry, dtype;
  Int offset;
  std::optional<std::string> scales;
  std::optional<Int> axis;
};

struct Form {
  std::string model;
  std::vector<Weight> weights;
};

struct Port {
  std::string tensor, dtype;
  std::optional<double> scale;
  std::string format;
};

struct TensorRT {
  Form ranged, typed;
  std::vector<Port> inputs, outputs;
  std::vector<std::pair<std::string, double>> ranges;
  std::vector<Cuda> enter, leave;
  std::vector<std::string> half_nodes;
  bool take_turns;
  std::string ranged_problem, typed_problem;
};

struct TensorRTGpu {
  std::optional<Form> ranged, typed;
  std::vector<std::pair<std::string, double>> ranges;
  std::string ranged_problem, typed_problem;
};

using Implementation = std::variant<Portable, Cuda, TensorRT, TensorRTGpu>;
const char* kind_of(const Implementation& implementation);

// -- the rest --------------------------------------------------------------------------------------

struct Segment {
  std::string name, processor;
  std::vector<std::string> inputs, outputs, nodes;
  std::vector<Implementation> implementations;
};

struct Crossing {
  std::string tensor, source;
  std::vector<std::string> targets;
  std::optional<Int> bytes;
};

struct Buffer {
  std::string tensor;
  Int offset, bytes;
};

struct NodePlacement {
  std::string node, processor, segment;
  double predicted_us;
};

struct FrameKernels {
  std::string pixels, tensor;
  Cuda kernels;
};

struct Manifest {
  std::string profile, precision, model;
  std::vector<std::string> inputs, outputs;
  std::vector<TensorInfo> tensors;
  std::vector<DimRange> dims;
  std::vector<Segment> segments;
  std::vector<Crossing> crossings;
  Int arena_bytes = 0;
  std::vector<Buffer> buffers;
  std::vector<NodePlacement> plan;
  std::vector<FrameKernels> frames;
  bool uncalibrated = false;
};

// Reads the JSON; unknown, missing and mistyped fields are refused. Throws EngineError.
Manifest read_manifest(const std::string& text);

// -- look-up tables of the rules and of sessions -------------------------------------------------

struct Facts {
  const Manifest& manifest;
  const Container& container;
  std::unordered_map<std::string, const TensorInfo*> tensors;
  std::unordered_map<std::string, const DimRange*> dims;
  std::unordered_map<std::string, const Segment*> segments;
  std::vector<std::pair<std::string, long>> made;  // in order: -1 for inputs, else the segment
  std::unordered_map<std::string, long> made_by;
  std::unordered_map<std::string, std::vector<long>> read_by;  // the number of segments: outputs

  Facts(const Manifest& manifest, const Container& container);

  const TensorInfo& tensor(const std::string& name) const { return *tensors.at(name); }
  // At the largest shape; nullopt where a dimension is unknown.
  std::optional<Int> largest_elements(const TensorInfo& tensor) const;
  std::optional<Int> largest_bytes(const TensorInfo& tensor) const;
};

// Throws EngineError with the first rule that the manifest breaks.
void check_manifest(const Manifest& manifest, const Container& container);

// Of kernels at one set of sizes. Throws EngineError.
void check_kernels_at(const Cuda& program, const Facts& facts, const std::vector<Int>& point,
                      const std::string& where);

// A product that stays at +-2^100 where it is larger.
Int product(Int first, Int second);

}  // namespace tandem::internal
