#include "rules.hpp"

#include <algorithm>
#include <unordered_set>

namespace tandem::internal {
namespace {

constexpr std::size_t kMaxCount = 100'000;  // of anything in a list
constexpr std::size_t kMaxName = 4096;      // characters

std::size_t characters(const std::string& text) {
  return static_cast<std::size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

template <typename Rows, typename Name>
void check_names(const std::string& title, const Rows& rows, Name name_of) {
  std::unordered_set<std::string> seen;
  for (const auto& row : rows) {
    const std::string& name = name_of(row);
    if (!seen.insert(name).second) refuse(title, ": ", quoted(name), " stands there twice; names are unique");
    const std::size_t length = characters(name);
    if (length == 0 || length > kMaxName)
      refuse(title, ": a name has ", length, " characters, the limits are 1 and ", kMaxName);
  }
  if (seen.size() > kMaxCount) refuse(title, ": ", seen.size(), " of them, the limit is ", kMaxCount);
}

const std::string& itself(const std::string& name) { return name; }

void names(const Facts& facts) {
  const Manifest& manifest = facts.manifest;
  check_names("inputs", manifest.inputs, itself);
  check_names("outputs", manifest.outputs, itself);
  check_names("tensors", manifest.tensors, [](const auto& row) -> auto& { return row.name; });
  check_names("dims", manifest.dims, [](const auto& row) -> auto& { return row.name; });
  check_names("segments", manifest.segments, [](const auto& row) -> auto& { return row.name; });
  check_names("crossings", manifest.crossings, [](const auto& row) -> auto& { return row.tensor; });
  check_names("memory", manifest.buffers, [](const auto& row) -> auto& { return row.tensor; });
  check_names("plan", manifest.plan, [](const auto& row) -> auto& { return row.node; });
  for (const Segment& segment : manifest.segments) {
    const std::string of = " of segment " + quoted(segment.name);
    check_names("inputs" + of, segment.inputs, itself);
    check_names("outputs" + of, segment.outputs, itself);
    check_names("nodes" + of, segment.nodes, itself);
    std::vector<std::string> kinds;
    for (const Implementation& implementation : segment.implementations) {
      kinds.emplace_back(kind_of(implementation));
      if (const auto* portable = std::get_if<Portable>(&implementation))
        check_names("weights" + of, portable->weights, itself);
    }
    check_names("implementations" + of, kinds, itself);
  }
  for (const Crossing& crossing : manifest.crossings)
    check_names("targets of crossing " + quoted(crossing.tensor), crossing.targets, itself);
}

void present(const Facts& facts) {
  const Manifest& manifest = facts.manifest;
  const std::pair<const char*, bool> required[] = {
      {"profile", manifest.profile.empty()},
      {"inputs", manifest.inputs.empty()},
      {"outputs", manifest.outputs.empty()},
      {"segments", manifest.segments.empty()},
  };
  for (const auto& [title, missing] : required)
    if (missing) refuse(title, ": there is none, at least one is needed");
  for (const Segment& segment : manifest.segments)
    if (segment.outputs.empty() || segment.implementations.empty())
      refuse("segment ", quoted(segment.name), " has no outputs or no implementations; it needs both");
}

void dims(const Facts& facts) {
  for (const DimRange& dim : facts.manifest.dims) {
    if (!(1 <= dim.min && dim.min <= dim.opt && dim.opt <= dim.max && dim.max <= kMaxElements))
      refuse("dimension ", quoted(dim.name), " has min ", dim.min, ", opt ", dim.opt, ", max ", dim.max,
             "; needed is 1 <= min <= opt <= max <= ", kMaxElements);
    if (dim.step < 1 || dim.min % dim.step != 0 || dim.opt % dim.step != 0 || dim.max % dim.step != 0)
      refuse("dimension ", quoted(dim.name), " goes in steps of ", dim.step, "; its min ", dim.min,
             ", opt ", dim.opt, " and max ", dim.max, " must be multiples of it");
  }
}

void tensors(const Facts& facts) {
  for (const TensorInfo& tensor : facts.manifest.tensors) {
    const std::string where = "tensor " + quoted(tensor.name);
    if (dtype_named(tensor.dtype) < 0) refuse(where, " has the unknown dtype ", quoted(tensor.dtype));
    if (tensor.shape.size() > kMaxRank)
      refuse(where, " has ", tensor.shape.size(), " dimensions, the limit is ", kMaxRank);
    for (const Dim& dim : tensor.shape) {
      if (const auto* size = std::get_if<Int>(&dim); size != nullptr && (*size < 0 || *size > kMaxElements))
        refuse(where, " has a size of ", *size, ", the limits are 0 and ", kMaxElements);
      if (const auto* name = std::get_if<std::string>(&dim); name != nullptr && !facts.dims.count(*name))
        refuse(where, " uses the dimension ", quoted(*name), ", which is not declared");
    }
    const std::optional<Int> elements = facts.largest_elements(tensor);
    if (elements && *elements > kMaxElements)
      refuse(where, " has up to ", *elements, " elements, the limit is ", kMaxElements);
    if (tensor.scale && tensor.dtype != "int8")
      refuse(where, " has a scale but dtype ", tensor.dtype, "; only int8 takes one");
    if (tensor.scale && !above_zero(*tensor.scale))
      refuse(where, " has the scale ", *tensor.scale, "; it must be finite and above 0");
  }
}

void given_dims(const Facts& facts) {
  std::unordered_set<std::string> of_inputs;
  for (const std::string& name : facts.manifest.inputs) {
    if (!facts.tensors.count(name)) refuse("inputs: ", quoted(name), " is not among the tensors");
    for (const Dim& dim : facts.tensor(name).shape) {
      if (std::holds_alternative<std::monostate>(dim))
        refuse("input ", quoted(name), " has a dimension of unknown size; give it a number or a name");
      if (const auto* dynamic = std::get_if<std::string>(&dim)) of_inputs.insert(*dynamic);
    }
  }
  for (const TensorInfo& tensor : facts.manifest.tensors)
    for (const Dim& dim : tensor.shape)
      if (const auto* name = std::get_if<std::string>(&dim); name != nullptr && !of_inputs.count(*name))
        refuse("tensor ", quoted(tensor.name), " uses the dimension ", quoted(*name), ", which no input sets");
}

void running_order(const Facts& facts) {
  const Manifest& manifest = facts.manifest;
  for (std::size_t i = 0; i < manifest.segments.size(); ++i) {
    const Segment& segment = manifest.segments[i];
    const auto index = static_cast<long>(i);
    const std::string where = "segment " + quoted(segment.name);
    for (const auto* names_of : {&segment.inputs, &segment.outputs})
      for (const std::string& name : *names_of)
        if (!facts.tensors.count(name)) refuse(where, " uses ", quoted(name), ", which is not among the tensors");
    for (const std::string& name : segment.inputs) {
      const auto producer = facts.made_by.find(name);
      if (producer == facts.made_by.end() || producer->second >= index)
        refuse(where, " reads ", quoted(name), ", which is neither an input nor made by an earlier segment");
    }
    for (const std::string& name : segment.outputs)
      if (facts.made_by.at(name) != index)
        refuse(where, " makes ", quoted(name), ", which is made or given before");
  }
  for (const std::string& name : manifest.outputs) {
    const auto producer = facts.made_by.find(name);
    if (producer == facts.made_by.end() || producer->second < 0)
      refuse("output ", quoted(name), " is not made by any segment");
  }
}

void entry_references(const Facts& facts) {
  for (const Segment& segment : facts.manifest.segments) {
    const std::string where = "segment " + quoted(segment.name);
    for (const Implementation& implementation : segment.implementations) {
      const auto* portable = std::get_if<Portable>(&implementation);
      if (portable == nullptr) continue;
      blob_named(facts, portable->model, where);
      for (const std::string& name : portable->weights)
        if (facts.container.find(name) == nullptr)
          refuse(where, " names the entry ", quoted(name), ", which is missing");
    }
  }
}

void plan(const Facts& facts) {
  for (const NodePlacement& row : facts.manifest.plan) {
    const std::string where = "plan: node " + quoted(row.node);
    const auto segment = facts.segments.find(row.segment);
    if (segment == facts.segments.end())
      refuse(where, " is in the segment ", quoted(row.segment), ", which is not there");
    if (segment->second->processor != row.processor)
      refuse(where, " is on ", row.processor, ", its segment ", quoted(row.segment), " on ",
             segment->second->processor);
    if (!(std::isfinite(row.predicted_us) && row.predicted_us >= 0))
      refuse(where, " takes ", row.predicted_us, " us; it must be 0 or more");
  }
}

// In this order: a rule may rely on all rules before it.
constexpr void (*kRules[])(const Facts&) = {
    names,      present,        dims,       tensors,      given_dims,      running_order, entry_references,
    check_cuda, check_tensorrt, check_tensorrt_gpu, check_frames, check_crossings, check_buffers,
    check_overlaps, plan,
};

}  // namespace

const Entry& blob_named(const Facts& facts, const std::string& name, const std::string& where) {
  const Entry* entry = facts.container.find(name);
  if (entry == nullptr) refuse(where, " names the entry ", quoted(name), ", which is missing");
  if (!entry->is_blob())
    refuse(where, " names the entry ", quoted(name), " of dtype ", kDtypes[entry->dtype].name, " and ",
           entry->shape.size(), " dimensions; it must be a row of uint8");
  return *entry;
}

std::optional<Int> fixed_bytes(const TensorInfo& tensor) {
  Int bytes = kDtypes[dtype_named(tensor.dtype)].bytes;
  for (const Dim& dim : tensor.shape) {
    const auto* size = std::get_if<Int>(&dim);
    if (size == nullptr) return std::nullopt;
    bytes = product(bytes, *size);
  }
  return bytes;
}

void check_manifest(const Manifest& manifest, const Container& container) {
  const Facts facts(manifest, container);
  for (const auto rule : kRules) rule(facts);
}

}  // namespace tandem::internal
