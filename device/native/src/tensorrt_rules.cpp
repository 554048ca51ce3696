// The rules for `tensorrt` and `tensorrt_gpu` implementations in a manifest.
#include <algorithm>

#include "rules.hpp"

namespace tandem::internal {
namespace {

constexpr Int kMaxWeightBytes = Int{1} << 30;
constexpr Int kVectorBytes = 32;  // of a vector of channels in the DLA's formats chw16 and chw32

Int elements_of(const Entry& entry) {
  Int elements = 1;
  for (const std::int64_t size : entry.shape) elements = product(elements, size);
  return elements;
}

void check_weight(const Facts& facts, const Weight& weight, const std::string& where) {
  const Entry* entry = facts.container.find(weight.entry);
  if (entry == nullptr) refuse(where, ": the entry ", quoted(weight.entry), " is missing");
  if (!weight.scales) return;
  const Entry* scales = facts.container.find(*weight.scales);
  if (scales == nullptr || scales->dtype != dtype_named("float32"))
    refuse(where, ": the entry ", quoted(*weight.scales), " is missing or not float32");
  if (!weight.axis) {
    if (!scales->shape.empty() && scales->shape != std::vector<std::int64_t>{1})
      refuse(where, ": the entry ", quoted(*weight.scales), " is not one scale");
    return;
  }
  const Int axis = *weight.axis;
  if (axis < 0 || axis >= static_cast<Int>(entry->shape.size()) ||
      scales->shape != std::vector<std::int64_t>{entry->shape[static_cast<std::size_t>(axis)]})
    refuse(where, ": the entry ", quoted(*weight.scales), " does not fit axis ", axis, " of ", quoted(weight.entry));
}

void check_form(const Facts& facts, const Form& form, const std::string& where) {
  blob_named(facts, form.model, where);
  Int end = 0;
  for (const Weight& weight : form.weights) {
    check_weight(facts, weight, where);
    if (weight.offset < end)
      refuse(where, ": weight ", quoted(weight.entry), " begins at ", weight.offset, ", before ", end);
    const Int item_bytes = weight.dtype == "float32" ? 4 : 2;
    end = weight.offset + product(elements_of(*facts.container.find(weight.entry)), item_bytes);
    if (end > kMaxWeightBytes)
      refuse(where, ": its weights end at ", end, " bytes, the limit is ", kMaxWeightBytes);
  }
}

void check_ranges(const std::vector<std::pair<std::string, double>>& ranges, const std::string& where) {
  for (const auto& [tensor, amax] : ranges)
    if (!above_zero(amax)) refuse(where, ": tensor ", quoted(tensor), " has the range ", amax, "; it must be above 0");
}

void check_port(const Port& port, const std::string& where) {
  if ((port.dtype == "int8") != port.scale.has_value())
    refuse(where, ": port ", quoted(port.tensor), " is ", port.dtype, "; int8 has a scale, float16 none");
  if (port.scale && !above_zero(*port.scale))
    refuse(where, ": port ", quoted(port.tensor), " has the scale ", *port.scale, "; it must be above 0");
}

Int packed_bytes(const Port& port, const TensorInfo& tensor) {
  Int sizes[4] = {1, 1, 1, 1};
  for (std::size_t axis = 0; axis < std::min<std::size_t>(4, tensor.shape.size()); ++axis)
    sizes[axis] = std::get<Int>(tensor.shape[axis]);
  const Int vector = kVectorBytes / kDtypes[dtype_named(port.dtype)].bytes;
  const Int vectors = (sizes[1] + vector - 1) / vector;
  return product(product(product(product(sizes[0], vectors), sizes[2]), sizes[3]), kVectorBytes);
}

// Addresses lie in one of the two tensors, whose places the board chooses.
void check_inside(const Cuda& program, const std::string& where) {
  const auto places = program.places();
  for (const TunableOp& op : program.works)
    for (const Tactic& tactic : op.tactics)
      for (const Launch& launch : tactic.launches)
        for (const Argument& argument : launch.arguments) {
          if (argument.kind != Argument::Kind::workspace) continue;
          const Amount& amount = argument.amount;
          if (amount.is_formula || std::none_of(places.begin(), places.end(), [&](const WorkspaceTensor* place) {
                return place->offset <= amount.number && amount.number < place->offset + place->bytes;
              }))
            refuse(where, ": its kernels take an address that is in none of its tensors");
        }
}

// Kernels of a port read and write its tensor alone, as it is in C order and in its format.
void check_port_programs(const Facts& facts, const std::vector<Port>& ports, const std::vector<Cuda>& programs,
                         bool enter, const std::string& where) {
  if (!programs.empty() && programs.size() != ports.size())
    refuse(where, ": ", ports.size(), " ports, ", programs.size(), " of them have kernels");
  for (std::size_t i = 0; i < programs.size(); ++i) {
    const std::string place = where + ": port " + quoted(ports[i].tensor);
    const Cuda& program = programs[i];
    check_port_kernels(program, facts, place, {});
    const auto tensor = facts.tensors.find(ports[i].tensor);
    const std::optional<Int> plain = tensor == facts.tensors.end() ? std::nullopt : fixed_bytes(*tensor->second);
    if (!plain) refuse(place, ": its sizes are not fixed");
    const Int packed = packed_bytes(ports[i], *tensor->second);
    const auto places = program.places();
    if (places.size() != 2 || places[0]->bytes != (enter ? *plain : packed) ||
        places[1]->bytes != (enter ? packed : *plain))
      refuse(place, " has ", *plain, " bytes in C order and ", packed, " in its format; its kernels have others");
    check_inside(program, place);
  }
}

}  // namespace

void check_tensorrt(const Facts& facts) {
  for (const Segment& segment : facts.manifest.segments) {
    for (const Implementation& implementation : segment.implementations) {
      const auto* part = std::get_if<TensorRT>(&implementation);
      if (part == nullptr) continue;
      const std::string where = "segment " + quoted(segment.name) + ", tensorrt";
      const auto check = [&](const std::vector<Port>& ports, const std::vector<std::string>& names) {
        if (!std::equal(ports.begin(), ports.end(), names.begin(), names.end(),
                        [](const Port& port, const std::string& name) { return port.tensor == name; }))
          refuse(where, ": its ports are not the segment's inputs and outputs, in order");
        for (const Port& port : ports) check_port(port, where);
      };
      check(part->inputs, segment.inputs);
      check(part->outputs, segment.outputs);
      check_ranges(part->ranges, where);
      check_port_programs(facts, part->inputs, part->enter, true, where);
      check_port_programs(facts, part->outputs, part->leave, false, where);
      check_form(facts, part->ranged, where);
      check_form(facts, part->typed, where);
    }
  }
}

void check_tensorrt_gpu(const Facts& facts) {
  for (const Segment& segment : facts.manifest.segments) {
    for (const Implementation& implementation : segment.implementations) {
      const auto* part = std::get_if<TensorRTGpu>(&implementation);
      if (part == nullptr) continue;
      const std::string where = "segment " + quoted(segment.name) + ", tensorrt_gpu";
      if (part->ranged.has_value() == !part->ranged_problem.empty() ||
          part->typed.has_value() == !part->typed_problem.empty())
        refuse(where, ": ranged and typed need a form, or the reason why there is none");
      if (!part->ranged && !part->typed) refuse(where, ": it has no form; at least one is needed");
      for (const auto* names : {&segment.inputs, &segment.outputs})
        for (const std::string& name : *names)
          for (const Dim& dim : facts.tensor(name).shape)
            if (std::holds_alternative<std::monostate>(dim))
              refuse(where, ": the size of tensor ", quoted(name), " is known only when run");
      check_ranges(part->ranges, where);
      for (const auto& form : {part->ranged, part->typed})
        if (form) check_form(facts, *form, where);
    }
  }
}

}  // namespace tandem::internal
