#include "manifest.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <initializer_list>

#include "json.hpp"

namespace tandem::internal {
namespace {

using json::Kind;
using json::Value;

[[noreturn]] void mistyped(const std::string& where, const char* expected, Kind actual) {
  refuse("the manifest is not valid: expected ", expected, ", got ", json::name_of(actual), " at ", where);
}

const Value& expect(const Value& value, Kind kind, const std::string& where) {
  if (value.kind != kind) mistyped(where, json::name_of(kind), value.kind);
  return value;
}

// -- one reader for each type of a field ----------------------------------------------------------

using Where = const std::string&;

std::string text(const Value& value, Where where) { return expect(value, Kind::text, where).text; }
Int integer(const Value& value, Where where) { return expect(value, Kind::integer, where).integer; }
bool boolean(const Value& value, Where where) { return expect(value, Kind::boolean, where).boolean; }

double real(const Value& value, Where where) {
  if (value.kind != Kind::integer) expect(value, Kind::real, where);
  return value.real;
}

template <typename Read>
auto list(const Value& value, Where where, Read read) {
  std::vector<decltype(read(value, where))> items;
  for (const Value& item : expect(value, Kind::array, where).items)
    items.push_back(read(item, where + "[" + std::to_string(items.size()) + "]"));
  return items;
}

std::vector<std::string> texts(const Value& value, Where where) { return list(value, where, text); }

std::vector<std::pair<std::string, double>> numbers_by_name(const Value& value, Where where) {
  std::vector<std::pair<std::string, double>> rows;
  expect(value, Kind::object, where);
  for (std::size_t i = 0; i < value.keys.size(); ++i)
    rows.emplace_back(value.keys[i], real(value.items[i], where + "." + value.keys[i]));
  return rows;
}

int texts_by_name(const Value& value, Where where) {
  expect(value, Kind::object, where);
  for (std::size_t i = 0; i < value.keys.size(); ++i) text(value.items[i], where + "." + value.keys[i]);
  return 0;
}

// A reader of null, too.
template <typename Read>
auto nullable(Read read) {
  return [read](const Value& value, Where where) {
    std::optional<decltype(read(value, where))> result;
    if (value.kind != Kind::null) result = read(value, where);
    return result;
  };
}

auto one_of(std::vector<std::string> choices) {
  return [choices = std::move(choices)](const Value& value, Where where) {
    const std::string& word = expect(value, Kind::text, where).text;
    if (std::find(choices.begin(), choices.end(), word) == choices.end())
      refuse("the manifest is not valid: ", quoted(word), " at ", where, " is none of its values");
    return word;
  };
}

const auto processor = one_of({"cpu", "gpu", "dla0", "dla1"});
const auto precision = one_of({"fp32", "fp16", "int8"});

Amount amount(const Value& value, Where where) {
  if (value.kind == Kind::text) return {true, 0, value.text};
  return {false, integer(value, where), {}};
}

Dim dim(const Value& value, Where where) {
  if (value.kind == Kind::null) return {};
  if (value.kind == Kind::text) return value.text;
  return integer(value, where);
}

// The fields of an object; at the end every one must have been asked for.
class Object {
 public:
  Object(const Value& value, Where where) : value_(expect(value, Kind::object, where)), where_(where) {}

  template <typename Read>
  auto get(const char* key, Read read) {
    const Value* field = take(key);
    if (field == nullptr)
      refuse("the manifest is not valid: the field ", quoted(key), " is missing at ", where_);
    return read(*field, where_ + "." + key);
  }

  template <typename Read, typename Default>
  auto get(const char* key, Read read, Default otherwise) {
    const Value* field = take(key);
    using Result = decltype(read(value_, where_));
    return field == nullptr ? Result(std::move(otherwise)) : read(*field, where_ + "." + key);
  }

  template <typename Read>
  auto get_optional(const char* key, Read read) {
    const Value* field = take(key);
    std::optional<decltype(read(value_, where_))> result;
    if (field != nullptr) result = read(*field, where_ + "." + key);
    return result;
  }

  void end() const {
    for (const std::string& key : value_.keys)
      if (std::find(taken_.begin(), taken_.end(), key) == taken_.end())
        refuse("the manifest is not valid: ", where_, " has the unknown field ", quoted(key));
  }

 private:
  const Value* take(const char* key) {
    taken_.emplace_back(key);
    return value_.find(key);
  }

  const Value& value_;
  std::string where_;
  std::vector<std::string> taken_;
};

// -- kernels --------------------------------------------------------------------------------------

Argument argument(const Value& value, Where where) {
  static const std::pair<const char*, Argument::Kind> kTags[] = {
      {"workspace", Argument::Kind::workspace},
      {"weights", Argument::Kind::weights},
      {"int32", Argument::Kind::int32},
      {"null", Argument::Kind::null},
  };
  expect(value, Kind::array, where);
  if (value.items.empty()) refuse("the manifest is not valid: an empty argument at ", where);
  const std::string tag = text(value.items[0], where);
  for (const auto& [name, kind] : kTags) {
    if (tag != name) continue;
    const std::size_t values = kind == Argument::Kind::null ? 0 : 1;
    if (value.items.size() != values + 1)
      refuse("the manifest is not valid: ", value.items.size() - 1, " values, ", values, " needed, at ", where);
    return {kind, values == 0 ? Amount{} : amount(value.items[1], where)};
  }
  refuse("the manifest is not valid: the unknown argument ", quoted(tag), " at ", where);
}

CompiledKernel kernel(const Value& value, Where where) {
  Object row(value, where);
  CompiledKernel kernel{row.get("cubin", text), row.get("function", text), row.get("threads", integer),
                        row.get("shared_bytes", integer), row.get("waits", boolean, false)};
  row.get("registers", nullable(integer), std::nullopt);
  row.get("spill_bytes", nullable(integer), std::nullopt);
  row.end();
  return kernel;
}

Launch launch(const Value& value, Where where) {
  Object row(value, where);
  Launch launch{row.get("kernel", integer), {}, {}};
  const std::vector<Amount> grid =
      row.get("grid", [](const Value& v, Where w) { return list(v, w, amount); });
  if (grid.size() != 3)
    refuse("the manifest is not valid: ", grid.size(), " sides of a grid at ", where, ", not 3");
  std::copy(grid.begin(), grid.end(), launch.grid);
  launch.arguments = row.get("arguments", [](const Value& v, Where w) { return list(v, w, argument); });
  row.end();
  return launch;
}

Tactic tactic(const Value& value, Where where) {
  Object row(value, where);
  Tactic tactic{row.get("launches", [](const Value& v, Where w) { return list(v, w, launch); })};
  row.end();
  return tactic;
}

TunableOp tunable_op(const Value& value, Where where) {
  Object row(value, where);
  TunableOp op{row.get("tactics", [](const Value& v, Where w) { return list(v, w, tactic); })};
  row.get("nodes", texts, std::vector<std::string>{});
  row.end();
  return op;
}

WorkspaceTensor workspace_tensor(const Value& value, Where where) {
  Object row(value, where);
  WorkspaceTensor stored{row.get("tensor", text), row.get("offset", integer), row.get("bytes", integer), {}};
  stored.shape = row.get(
      "shape", nullable([](const Value& v, Where w) { return list(v, w, amount); }), std::nullopt);
  row.end();
  return stored;
}

std::vector<WorkspaceTensor> workspace_tensors(const Value& value, Where where) {
  return list(value, where, workspace_tensor);
}

Cuda cuda_fields(Object& row) {
  Cuda program{};
  program.sm = row.get("sm", integer);
  program.kernels = row.get("kernels", [](const Value& v, Where w) { return list(v, w, kernel); });
  program.works = row.get("works", [](const Value& v, Where w) { return list(v, w, tunable_op); });
  program.weights = row.get("weights", text);
  program.workspace_bytes = row.get("workspace_bytes", integer);
  program.inputs = row.get("inputs", workspace_tensors);
  program.outputs = row.get("outputs", workspace_tensors);
  program.borders_at = row.get_optional("borders_at", integer);
  return program;
}

// Where a type stands alone its tag may be left out.
Cuda cuda(const Value& value, Where where) {
  Object row(value, where);
  row.get("kind", one_of({"cuda"}), std::string("cuda"));
  Cuda program = cuda_fields(row);
  row.end();
  return program;
}

std::vector<Cuda> cudas(const Value& value, Where where) { return list(value, where, cuda); }

// -- TensorRT -------------------------------------------------------------------------------------

Weight weight(const Value& value, Where where) {
  Object row(value, where);
  Weight weight{row.get("entry", text), row.get("dtype", one_of({"float32", "float16"})),
                row.get("offset", integer), row.get("scales", nullable(text), std::nullopt),
                row.get("axis", nullable(integer), std::nullopt)};
  row.end();
  return weight;
}

Form form(const Value& value, Where where) {
  Object row(value, where);
  Form form{row.get("model", text),
            row.get("weights", [](const Value& v, Where w) { return list(v, w, weight); },
                    std::vector<Weight>{})};
  row.end();
  return form;
}

Port port(const Value& value, Where where) {
  Object row(value, where);
  Port port{row.get("tensor", text), row.get("dtype", one_of({"int8", "float16"})),
            row.get("scale", nullable(real), std::nullopt), row.get("format", one_of({"chw16", "chw32"}))};
  row.end();
  return port;
}

std::vector<Port> ports(const Value& value, Where where) { return list(value, where, port); }

TensorRT tensorrt_fields(Object& row) {
  TensorRT part{row.get("ranged", form),
                row.get("typed", form),
                row.get("inputs", ports),
                row.get("outputs", ports),
                row.get("ranges", numbers_by_name),
                row.get("enter", cudas, std::vector<Cuda>{}),
                row.get("leave", cudas, std::vector<Cuda>{}),
                row.get("half_nodes", texts, std::vector<std::string>{}),
                row.get("take_turns", boolean, false),
                row.get("ranged_problem", text, ""),
                row.get("typed_problem", text, "")};
  return part;
}

TensorRTGpu tensorrt_gpu_fields(Object& row) {
  row.get("precision", precision);
  TensorRTGpu part{row.get("ranged", nullable(form), std::nullopt),
                   row.get("typed", nullable(form), std::nullopt),
                   row.get("ranges", numbers_by_name, std::vector<std::pair<std::string, double>>{}),
                   row.get("ranged_problem", text, ""), row.get("typed_problem", text, "")};
  row.get("half_nodes", texts, std::vector<std::string>{});
  return part;
}

// -- the manifest ---------------------------------------------------------------------------------

Portable portable_fields(Object& row) {
  return {row.get("model", text), row.get("weights", texts, std::vector<std::string>{})};
}

Implementation implementation(const Value& value, Where where) {
  Object row(value, where);
  const std::string kind = row.get("kind", text);
  Implementation result;
  if (kind == "portable")
    result = portable_fields(row);
  else if (kind == "cuda")
    result = cuda_fields(row);
  else if (kind == "tensorrt")
    result = tensorrt_fields(row);
  else if (kind == "tensorrt_gpu")
    result = tensorrt_gpu_fields(row);
  else
    refuse("the manifest is not valid: the unknown implementation ", quoted(kind), " at ", where);
  row.end();
  return result;
}

TensorInfo tensor_info(const Value& value, Where where) {
  Object row(value, where);
  TensorInfo tensor{row.get("name", text), row.get("dtype", text),
                    row.get("shape", [](const Value& v, Where w) { return list(v, w, dim); }),
                    row.get("scale", nullable(real), std::nullopt)};
  row.end();
  return tensor;
}

DimRange dim_range(const Value& value, Where where) {
  Object row(value, where);
  DimRange range{row.get("name", text), row.get("min", integer), row.get("opt", integer),
                 row.get("max", integer), row.get("step", integer, Int{1})};
  row.end();
  return range;
}

Segment segment(const Value& value, Where where) {
  Object row(value, where);
  Segment segment{
      row.get("name", text),
      row.get("processor", processor),
      row.get("inputs", texts),
      row.get("outputs", texts),
      row.get("nodes", texts),
      row.get("implementations", [](const Value& v, Where w) { return list(v, w, implementation); })};
  row.end();
  return segment;
}

Crossing crossing(const Value& value, Where where) {
  Object row(value, where);
  Crossing crossing{row.get("tensor", text), row.get("source", text), row.get("targets", texts),
                    row.get("bytes", nullable(integer))};
  row.end();
  return crossing;
}

Buffer buffer(const Value& value, Where where) {
  Object row(value, where);
  Buffer buffer{row.get("tensor", text), row.get("offset", integer), row.get("bytes", integer)};
  row.end();
  return buffer;
}

NodePlacement placement(const Value& value, Where where) {
  Object row(value, where);
  NodePlacement placement{row.get("node", text), row.get("processor", processor),
                          row.get("segment", text), row.get("predicted_us", real)};
  row.get("op", text);
  row.get("rule", text);
  row.get("reason", text);
  row.end();
  return placement;
}

FrameKernels frame_kernels(const Value& value, Where where) {
  Object row(value, where);
  FrameKernels frames{row.get("pixels", one_of({"bgr", "nv12"})), row.get("tensor", text),
                      row.get("kernels", cuda)};
  row.end();
  return frames;
}

// Returns whether the ranges were made up.
bool calibration(const Value& value, Where where) {
  Object row(value, where);
  const std::string method = row.get("method", text);
  row.get("samples", integer);
  row.get("data_sha256", text);
  row.get("table_sha256", text, "");
  row.end();
  return method == "dummy";
}

int measurement(const Value& value, Where where) {
  Object row(value, where);
  row.get("name", text);
  row.get("value", real);
  row.get("how", text);
  row.end();
  return 0;
}

void provenance(const Value& value, Where where, Manifest& manifest) {
  Object row(value, where);
  manifest.model = row.get("model", text);
  row.get("model_sha256", text);
  manifest.precision = row.get("precision", precision);
  row.get("passes", texts);
  row.get("versions", texts_by_name);
  manifest.uncalibrated = row.get("calibration", nullable(calibration), std::nullopt).value_or(false);
  row.get("licence", text, "");
  row.get("metadata", texts_by_name, 0);
  row.get("measured", [](const Value& v, Where w) { return list(v, w, measurement); }, std::vector<int>{});
  row.end();
}

// How images become inputs: device/engine/preprocessing.py has the meaning of the fields.
int preprocessing(const Value& value, Where where) {
  Object row(value, where);
  const auto reals = [](const Value& v, Where w) { return list(v, w, real); };
  const std::string resize = row.get(
      "resize", one_of({"letterbox", "letterbox-corner", "stretch", "centre-crop"}), "letterbox");
  const double crop = row.get("crop_fraction", real, 1.0);
  row.get("interpolation", one_of({"linear", "pillow-bilinear", "pillow-bicubic"}), "linear");
  const std::string color = row.get("color", one_of({"rgb", "bgr", "grey"}), "rgb");
  row.get("layout", one_of({"nchw", "nhwc"}), "nchw");
  const double scale = row.get("scale", real, 1.0 / 255.0);
  const std::vector<double> mean = row.get("mean", reals, std::vector<double>{0.0});
  const std::vector<double> deviation = row.get("std", reals, std::vector<double>{1.0});
  const Int pad_value = row.get("pad_value", integer, Int{114});
  const std::string dtype = row.get("dtype", one_of({"float32", "float16", "uint8"}), "float32");
  row.end();
  const std::size_t channels = color == "grey" ? 1 : 3;
  const auto is_zero = [](double n) { return n == 0.0; };
  const auto is_one = [](double n) { return n == 1.0; };
  const auto above_zero = [](double n) { return std::isfinite(n) && n > 0.0; };
  const auto fits = [&](const std::vector<double>& row_of) {
    return row_of.size() == 1 || row_of.size() == channels;
  };
  const char* problem =
      !fits(mean) || !fits(deviation) ? "mean and std need one number for each channel, or one for all"
      : !(crop > 0.0 && crop <= 1.0) ? "crop_fraction must be above 0 and at most 1"
      : pad_value < 0 || pad_value > 255 ? "pad_value must be from 0 to 255"
      : !above_zero(scale) || !std::all_of(deviation.begin(), deviation.end(), above_zero)
          ? "scale and std must be finite and above 0"
      : !std::all_of(mean.begin(), mean.end(), [](double n) { return std::isfinite(n); })
          ? "mean must be finite"
      : crop != 1.0 && resize != "centre-crop" ? "only 'centre-crop' has a crop fraction"
      : dtype == "uint8" && !(scale == 1.0 && std::all_of(mean.begin(), mean.end(), is_zero) &&
                              std::all_of(deviation.begin(), deviation.end(), is_one))
          ? "a uint8 input takes pixels as they are: scale 1, mean 0, std 1"
          : nullptr;
  if (problem != nullptr) refuse("the manifest is not valid: ", problem, " at ", where);
  return 0;
}

template <typename Read>
auto list_of(Read read) {
  return [read](const Value& value, Where where) { return list(value, where, read); };
}

}  // namespace

std::vector<const WorkspaceTensor*> Cuda::places() const {
  std::vector<const WorkspaceTensor*> rows;
  for (const WorkspaceTensor& stored : inputs) rows.push_back(&stored);
  for (const WorkspaceTensor& stored : outputs) rows.push_back(&stored);
  return rows;
}

const char* kind_of(const Implementation& implementation) {
  static constexpr const char* kKinds[] = {"portable", "cuda", "tensorrt", "tensorrt_gpu"};
  return kKinds[implementation.index()];
}

Int product(Int first, Int second) {
  constexpr Int kClamp = Int{1} << 100;
  Int result;
  if (__builtin_mul_overflow(first, second, &result)) return (first < 0) == (second < 0) ? kClamp : -kClamp;
  return std::clamp(result, -kClamp, kClamp);
}

Manifest read_manifest(const std::string& source) {
  const Value root = json::parse(source);
  const std::string where = "$";
  const Value* version = expect(root, Kind::object, where).find("format");
  if (version == nullptr) refuse("the manifest is not valid: it has no format version");
  const Int format = integer(*version, "$.format");
  if (format != kFormatVersion)
    refuse("format version ", format, ", this library reads ", kFormatVersion,
           format > kFormatVersion ? "; update Tandem" : "; build it again");
  Object row(root, where);
  row.get("format", integer);
  Manifest manifest;
  manifest.profile = row.get("profile", text);
  manifest.inputs = row.get("inputs", texts);
  manifest.outputs = row.get("outputs", texts);
  manifest.tensors = row.get("tensors", list_of(tensor_info));
  manifest.dims = row.get("dims", list_of(dim_range));
  manifest.segments = row.get("segments", list_of(segment));
  manifest.crossings = row.get("crossings", list_of(crossing));
  row.get("memory", [&manifest](const Value& value, Where at) {
    Object memory(value, at);
    manifest.arena_bytes = memory.get("arena_bytes", integer);
    manifest.buffers = memory.get("buffers", list_of(buffer));
    memory.end();
    return 0;
  });
  manifest.plan = row.get("plan", list_of(placement));
  row.get("provenance", [&manifest](const Value& value, Where at) {
    provenance(value, at, manifest);
    return 0;
  });
  row.get("preprocessing", preprocessing, 0);
  manifest.frames = row.get("frames", list_of(frame_kernels), std::vector<FrameKernels>{});
  row.end();
  return manifest;
}

Facts::Facts(const Manifest& m, const Container& c) : manifest(m), container(c) {
  const auto make = [this](const std::string& name, long by) {
    if (made_by.emplace(name, by).second) made.emplace_back(name, by);
  };
  for (const std::string& name : m.inputs) make(name, -1);
  for (const TensorInfo& tensor : m.tensors) tensors[tensor.name] = &tensor;
  for (const DimRange& range : m.dims) dims[range.name] = &range;
  for (std::size_t i = 0; i < m.segments.size(); ++i) {
    const Segment& segment = m.segments[i];
    segments[segment.name] = &segment;
    for (const std::string& name : segment.outputs) make(name, static_cast<long>(i));
    for (const std::string& name : segment.inputs) read_by[name].push_back(static_cast<long>(i));
  }
  for (const std::string& name : m.outputs) read_by[name].push_back(static_cast<long>(m.segments.size()));
}

std::optional<Int> Facts::largest_elements(const TensorInfo& tensor) const {
  Int elements = 1;
  for (const Dim& dim : tensor.shape) {
    if (std::holds_alternative<std::monostate>(dim)) return std::nullopt;
    const auto* size = std::get_if<Int>(&dim);
    elements = product(elements, size != nullptr ? *size : dims.at(std::get<std::string>(dim))->max);
  }
  return elements;
}

std::optional<Int> Facts::largest_bytes(const TensorInfo& tensor) const {
  const std::optional<Int> elements = largest_elements(tensor);
  if (!elements) return std::nullopt;
  return product(*elements, kDtypes[dtype_named(tensor.dtype)].bytes);
}

}  // namespace tandem::internal
