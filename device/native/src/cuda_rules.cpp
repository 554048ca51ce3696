// The rules for `cuda` implementations and for the kernels of frames and ports: every address that a
// launch passes is inside the workspace or the weights, every launch inside the hardware's limits.
#include <algorithm>
#include <cctype>
#include <set>

#include "rules.hpp"

namespace tandem::internal {
namespace {

// CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
constexpr Int kMaxGrid[] = {(Int{1} << 31) - 1, 65535, 65535};
constexpr Int kMaxThreads = 1024;
constexpr Int kMaxSharedBytes = 227 * 1024;
constexpr Int kWarp = 32;
constexpr Int kFirstWaitingSm = 90;
constexpr std::size_t kMaxArguments = 64;
constexpr std::size_t kMaxLaunches = 100'000;
constexpr Int kMaxWorkspaceBytes = Int{1} << 40;
constexpr Int kInt32 = Int{1} << 31;
constexpr std::size_t kMaxFunctionName = 256;
constexpr std::size_t kFrameSizes = 8;  // d0, d1, ... of kernels that take frames

template <typename Visit>  // visit(launch, where)
void each_launch(const Cuda& program, const std::string& where, Visit visit) {
  for (std::size_t op = 0; op < program.works.size(); ++op) {
    const std::string of_op = where + ": operation " + std::to_string(op);
    const auto& tactics = program.works[op].tactics;
    if (tactics.empty()) refuse(of_op, " has no tactic");
    for (std::size_t tactic = 0; tactic < tactics.size(); ++tactic)
      for (std::size_t i = 0; i < tactics[tactic].launches.size(); ++i)
        visit(tactics[tactic].launches[i],
              of_op + ", tactic " + std::to_string(tactic) + ", launch " + std::to_string(i));
  }
}

bool is_function(const std::string& name) {
  const auto letter = [](char c) { return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || c == '_'; };
  return !name.empty() && name.size() <= kMaxFunctionName && letter(name[0]) &&
         std::all_of(name.begin(), name.end(), [&](char c) { return letter(c) || (c >= '0' && c <= '9'); });
}

void check_sizes(const Cuda& program, const std::string& where) {
  if (program.sm < 10 || program.sm > 999)
    refuse(where, " is for sm_", program.sm, "; architectures are sm_10 to sm_999");
  if (program.workspace_bytes < 0 || program.workspace_bytes > kMaxWorkspaceBytes)
    refuse(where, " has a workspace of ", program.workspace_bytes, " bytes, the limits are 0 and ",
           kMaxWorkspaceBytes);
  std::size_t launches = 0;
  for (const TunableOp& op : program.works)
    for (const Tactic& tactic : op.tactics) launches += tactic.launches.size();
  if (std::max(launches, program.kernels.size()) > kMaxLaunches)
    refuse(where, " has ", program.kernels.size(), " kernels and ", launches, " launches, the limit is ",
           kMaxLaunches);
}

void check_kernel(const CompiledKernel& kernel, Int sm, const std::string& where) {
  if (!is_function(kernel.function)) refuse(where, ": ", quoted(kernel.function), " is no name of a kernel");
  const std::string of = where + ": kernel " + kernel.function;
  if (kernel.threads <= 0 || kernel.threads > kMaxThreads || kernel.threads % kWarp != 0)
    refuse(of, " has ", kernel.threads, " threads; a block has a multiple of ", kWarp, " up to ", kMaxThreads);
  if (kernel.shared_bytes < 0 || kernel.shared_bytes > kMaxSharedBytes)
    refuse(of, " takes ", kernel.shared_bytes, " bytes of shared memory, the limits are 0 and ", kMaxSharedBytes);
  if (kernel.waits && sm < kFirstWaitingSm)
    refuse(of, " waits for the one before it on sm_", sm, "; kernels can from sm_", kFirstWaitingSm, " on");
}

void check_program(const Cuda& program, const Facts& facts, const std::string& where) {
  check_sizes(program, where);
  blob_named(facts, program.weights, where);
  for (const CompiledKernel& kernel : program.kernels) blob_named(facts, kernel.cubin, where);
  for (const CompiledKernel& kernel : program.kernels) check_kernel(kernel, program.sm, where);
}

void check_launches(const Cuda& program, const std::string& where) {
  each_launch(program, where, [&](const Launch& launch, const std::string& at) {
    if (launch.kernel < 0 || launch.kernel >= static_cast<Int>(program.kernels.size()))
      refuse(at, " starts kernel ", launch.kernel, " of ", program.kernels.size());
    if (launch.arguments.size() > kMaxArguments)
      refuse(at, " has ", launch.arguments.size(), " arguments, the limit is ", kMaxArguments);
  });
}

void check_boundary(const WorkspaceTensor& stored, const Cuda& program, const Facts& facts,
                    const std::string& of) {
  const std::string where = of + ": tensor " + quoted(stored.tensor);
  const TensorInfo& tensor = facts.tensor(stored.tensor);
  const std::optional<Int> bytes = fixed_bytes(tensor);
  if (!stored.shape && bytes) {
    if (stored.bytes != *bytes) refuse(where, " has ", *bytes, " bytes, here ", stored.bytes);
  } else if (!stored.shape || stored.shape->size() != tensor.shape.size()) {
    refuse(where, " is dynamic, its shape in the workspace is not");
  }
  if (stored.offset < 0 || stored.offset % kArenaAlignment != 0)
    refuse(where, " lies at ", stored.offset, "; it must be a multiple of ", kArenaAlignment);
  if (stored.bytes < 0 || stored.offset + stored.bytes > program.workspace_bytes)
    refuse(where, " ends at ", stored.offset + stored.bytes, ", the workspace at ", program.workspace_bytes);
}

// Inputs and outputs that may lie elsewhere share no byte with each other or other tensors.
void check_apart(const Cuda& program, const std::string& where) {
  if (!program.borders_at) return;
  std::vector<const WorkspaceTensor*> rows = program.places();
  std::stable_sort(rows.begin(), rows.end(), [](auto* a, auto* b) { return a->offset < b->offset; });
  Int end = *program.borders_at;
  for (const WorkspaceTensor* stored : rows) {
    if (stored->offset < end)
      refuse(where, ": tensor ", quoted(stored->tensor), " lies at ", stored->offset, ", what is before it ends at ",
             end, "; inputs and outputs lie apart");
    end = stored->offset + stored->bytes;
  }
}

void check_boundaries(const Cuda& program, const Segment& segment, const Facts& facts, const std::string& where) {
  const auto check = [&](const char* title, const auto& names, const auto& tensors) {
    const bool same = std::equal(names.begin(), names.end(), tensors.begin(), tensors.end(),
                                 [](const std::string& name, const auto& stored) { return name == stored.tensor; });
    if (!same) refuse(where, " places ", tensors.size(), " ", title, ", which are not those of the segment");
    for (const WorkspaceTensor& stored : tensors) check_boundary(stored, program, facts, where);
  };
  check("inputs", segment.inputs, program.inputs);
  check("outputs", segment.outputs, program.outputs);
  check_apart(program, where);
}

void check_argument(const Argument& argument, const Cuda& program, const std::vector<Int>& point,
                    Int weights_bytes, const std::string& where) {
  if (argument.kind == Argument::Kind::null) return;
  const Int value = evaluate(argument.amount, point);
  if (argument.kind == Argument::Kind::int32) {
    if (value < -kInt32 || value >= kInt32) refuse(where, " passes ", value, ", which is no integer of 32 bits");
    return;
  }
  const bool workspace = argument.kind == Argument::Kind::workspace;
  const Int limit = workspace ? program.workspace_bytes : weights_bytes;
  if (workspace && program.borders_at && value >= *program.borders_at) {
    const auto places = program.places();
    if (std::none_of(places.begin(), places.end(), [&](const WorkspaceTensor* place) {
          return place->offset <= value && value < place->offset + place->bytes;
        }))
      refuse(where, " passes the place ", value, ", where no input or output lies");
  }
  if (value < 0 || value >= limit)
    refuse(where, " passes the place ", value, " of the ", workspace ? "workspace" : "weights", ", which has ",
           limit, " bytes");
}

void check_launches_at(const Cuda& program, const Facts& facts, const std::vector<Int>& point,
                       const std::string& where) {
  const Entry* weights = facts.container.find(program.weights);
  const Int weights_bytes = weights == nullptr ? 0 : weights->bytes();
  each_launch(program, where, [&](const Launch& launch, const std::string& at) {
    std::vector<Int> grid;
    bool fits = true;
    for (int side = 0; side < 3; ++side) {
      grid.push_back(evaluate(launch.grid[side], point));
      fits = fits && grid.back() >= 1 && grid.back() <= kMaxGrid[side];
    }
    if (!fits) refuse(at, " has the grid ", list_text(grid), ", the limits are 1 and 2147483647, 65535, 65535");
    for (const Argument& argument : launch.arguments) check_argument(argument, program, point, weights_bytes, at);
  });
}

// The shape and the bytes of a tensor whose sizes are formulas.
void check_fits(const WorkspaceTensor& stored, const Facts& facts, const std::vector<Int>& point,
                const std::string& of) {
  if (!stored.shape) return;
  const std::string where = of + ": tensor " + quoted(stored.tensor);
  const TensorInfo& tensor = facts.tensor(stored.tensor);
  Int bytes = kDtypes[dtype_named(tensor.dtype)].bytes;
  bool negative = false;
  for (std::size_t axis = 0; axis < stored.shape->size(); ++axis) {
    const Int size = evaluate((*stored.shape)[axis], point);
    const Dim& dim = tensor.shape[axis];
    Int known = size;
    if (const auto* number = std::get_if<Int>(&dim)) known = *number;
    if (const auto* name = std::get_if<std::string>(&dim)) {
      const auto& ranges = facts.manifest.dims;
      const auto row = std::find_if(ranges.begin(), ranges.end(), [&](const auto& r) { return r.name == *name; });
      known = point[static_cast<std::size_t>(row - ranges.begin())];
    }
    if (known != size)
      refuse(where, " has the size ", known, " in dimension ", axis, ", in the workspace ", size);
    negative = negative || size < 0;
    bytes = product(bytes, size);
  }
  if (negative || bytes > stored.bytes) refuse(where, " does not fit ", stored.bytes, " bytes");
}

void check_frame_row(const FrameKernels& row, const Facts& facts) {
  const std::string where = "frames of " + row.pixels;
  const Cuda& program = row.kernels;
  check_port_kernels(program, facts, where, std::vector<Int>(kFrameSizes, 1));
  const auto& inputs = facts.manifest.inputs;
  if (std::find(inputs.begin(), inputs.end(), row.tensor) == inputs.end())
    refuse(where, " become ", quoted(row.tensor), ", which is no input");
  const TensorInfo& tensor = facts.tensor(row.tensor);
  Int image_bytes = kDtypes[dtype_named(tensor.dtype)].bytes;
  std::size_t numbers = 0;
  for (std::size_t axis = 1; axis < tensor.shape.size(); ++axis)
    if (const auto* size = std::get_if<Int>(&tensor.shape[axis])) {
      image_bytes = product(image_bytes, *size);
      ++numbers;
    }
  if (numbers != 3 || tensor.shape.size() != 4)
    refuse(where, " become ", quoted(row.tensor), " of ", tensor.shape.size(), " dimensions; it must be of images");
  if (program.inputs.size() != 1 || program.outputs.size() != 1 || program.outputs[0].bytes != image_bytes)
    refuse(where, " have ", program.inputs.size(), " inputs and ", program.outputs.size(),
           " outputs; they must have one, and one of ", image_bytes, " bytes");
  std::set<Int> starts;
  for (const WorkspaceTensor* stored : program.places()) starts.insert(stored->offset);
  each_launch(program, where, [&](const Launch& launch, const std::string& at) {
    for (const Argument& argument : launch.arguments)
      if (argument.kind == Argument::Kind::workspace &&
          (argument.amount.is_formula || !starts.count(argument.amount.number)))
        refuse(at, " passes a place where neither its frame nor its image starts");
  });
}

}  // namespace

void check_kernels_at(const Cuda& program, const Facts& facts, const std::vector<Int>& point,
                      const std::string& where) {
  for (const WorkspaceTensor* stored : program.places()) check_fits(*stored, facts, point, where);
  check_launches_at(program, facts, point, where);
}

void check_cuda(const Facts& facts) {
  std::vector<std::vector<Int>> points(3);
  for (const DimRange& dim : facts.manifest.dims) {
    points[0].push_back(dim.min);
    points[1].push_back(dim.opt);
    points[2].push_back(dim.max);
  }
  for (const Segment& segment : facts.manifest.segments) {
    for (const Implementation& implementation : segment.implementations) {
      const auto* program = std::get_if<Cuda>(&implementation);
      if (program == nullptr) continue;
      const std::string where = "segment " + quoted(segment.name) + " (cuda)";
      check_program(*program, facts, where);
      check_boundaries(*program, segment, facts, where);
      check_launches(*program, where);
      for (std::size_t i = 0; i < points.size(); ++i)
        if (i == 0 || points[i] != points[i - 1]) check_kernels_at(*program, facts, points[i], where);
    }
  }
}

void check_port_kernels(const Cuda& program, const Facts& facts, const std::string& where,
                        const std::vector<Int>& point) {
  check_program(program, facts, where);
  check_launches(program, where);
  check_launches_at(program, facts, point, where);
}

void check_frames(const Facts& facts) {
  std::set<std::string> pixels;
  for (const FrameKernels& row : facts.manifest.frames)
    if (!pixels.insert(row.pixels).second) refuse("frames: two kernels take the same pixels, ", row.pixels);
  for (const FrameKernels& row : facts.manifest.frames) check_frame_row(row, facts);
}

}  // namespace tandem::internal
