#include "plans.hpp"

#include <dirent.h>
#include <sys/stat.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <limits>

#include "json.hpp"
#include "sha256.hpp"

namespace tandem::internal {
namespace {

constexpr int kFormat = 1;
constexpr std::size_t kKeyDigits = 40;
constexpr off_t kMaxRecordBytes = 1024 * 1024;

// TensorRT before `end` (major, minor, patch) takes this form, or none: `why`. Rows of releases.py.
struct Release {
  int end[3];
  const char* form;
  const char* why;
};
constexpr Release kReleases[] = {
    {{8, 5, 0}, nullptr, "it is older than 8.5, which JetPack 5.1 brings"},
    {{10, 8, 0}, "ranged", ""},
    {{11, 4, 1}, nullptr, "10.8 to 11.4.0 have no DLA on Jetson; JetPack 6 has 10.3, 7.2.2 has 11.4.1"},
    {{1000, 0, 0}, "typed", ""},
};

// -- what is hashed: the JSON that msgspec writes ---------------------------------------------------

std::string json_of(const std::string& text) {
  std::string out = "\"";
  for (const char letter : text) {
    constexpr char kLetters[] = "\"\\\b\f\n\r\t", kEscapes[] = "\"\\bfnrt";
    const char* known = letter == 0 ? nullptr : std::char_traits<char>::find(kLetters, 7, letter);
    char code[8];
    if (known != nullptr) {
      out.append({'\\', kEscapes[known - kLetters]});
    } else if (static_cast<unsigned char>(letter) < 0x20) {
      std::snprintf(code, sizeof code, "\\u%04x", static_cast<unsigned>(letter));
      out += code;
    } else {
      out += letter;
    }
  }
  return out + "\"";
}
std::string json_of(Int value) { return decimal(value); }

// The fewest digits that give the same number; an exponent below 1e-5 and from 1e16 on.
std::string json_of(double value) {
  char text[32];
  const auto end = std::to_chars(text, text + sizeof text, value, std::chars_format::scientific).ptr;
  const std::string all(text, end), sign = all[0] == '-' ? "-" : "";
  const std::size_t at = all.find('e');
  const int exponent = std::atoi(all.c_str() + at + 1), point = exponent + 1;
  std::string digits = all.substr(sign.size(), at - sign.size());
  if (digits.size() > 1) digits.erase(1, 1);
  if (value == 0) return sign + "0.0";
  const int count = static_cast<int>(digits.size());
  if (point <= -5 || point > 16)
    return sign + (count > 1 ? digits.insert(1, ".") : digits) + "e" + std::to_string(exponent);
  if (point <= 0) return sign + "0." + std::string(static_cast<std::size_t>(-point), '0') + digits;
  if (count <= point) return sign + digits.append(static_cast<std::size_t>(point - count), '0') + ".0";
  return sign + digits.insert(static_cast<std::size_t>(point), ".");
}

template <typename T>
std::string json_of(const std::optional<T>& value) {
  return value ? json_of(*value) : "null";
}
std::string json_of(const Port& port) {
  return "{\"tensor\":" + json_of(port.tensor) + ",\"dtype\":" + json_of(port.dtype) +
         ",\"format\":" + json_of(port.format) + ",\"scale\":" + json_of(port.scale) + "}";
}
std::string json_of(const Weight& weight) {
  return "{\"entry\":" + json_of(weight.entry) + ",\"dtype\":" + json_of(weight.dtype) +
         ",\"offset\":" + json_of(weight.offset) + ",\"scales\":" + json_of(weight.scales) +
         ",\"axis\":" + json_of(weight.axis) + "}";
}
template <typename T>
std::string json_of(const std::vector<T>& values) {
  std::string out;
  for (const T& value : values) out += (out.empty() ? "" : ",") + json_of(value);
  return "[" + out + "]";
}
std::string json_of(std::vector<std::pair<std::string, double>> rows) {
  std::sort(rows.begin(), rows.end());
  std::string out;
  for (const auto& [name, value] : rows) out += (out.empty() ? "" : ",") + json_of(name) + ":" + json_of(value);
  return "{" + out + "}";
}

// -- files --------------------------------------------------------------------------------------------

// Nothing where there is none, or something else: a pipe would wait.
std::optional<std::string> bytes_of_file(const std::string& path, off_t most = std::numeric_limits<off_t>::max()) {
  struct stat facts;
  if (::stat(path.c_str(), &facts) != 0 || !S_ISREG(facts.st_mode) || facts.st_size > most) return std::nullopt;
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  return std::string(std::istreambuf_iterator<char>(file), {});
}

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  DIR* opened = ::opendir(folder.c_str());
  if (opened == nullptr) return names;
  while (const dirent* entry = ::readdir(opened)) names.push_back(entry->d_name);
  ::closedir(opened);
  return names;
}

// Without spaces and zeros around it.
std::string text_of_file(const std::string& path) {
  const std::string text = bytes_of_file(path).value_or("");
  const std::string_view around("\0\n ", 3);
  const std::size_t first = text.find_first_not_of(around);
  return first == std::string::npos ? "" : text.substr(first, text.find_last_not_of(around) + 1 - first);
}

std::string digest_of(std::string_view bytes) {
  Sha256 total;
  total.update(bytes);
  return total.hex();
}

std::string soc_of(const std::string& compatible) {
  std::string last;
  for (std::size_t first = 0; first < compatible.size();) {
    const std::size_t end = std::min(compatible.find('\0', first), compatible.size());
    const std::string name = compatible.substr(first, end - first);
    if (name.find_first_not_of(" \t\n\r\f\v") != std::string::npos) last = name;
    first = end + 1;
  }
  return last.substr(last.rfind(',') + 1);
}

int cores_below(const std::string& devices) {
  int count = 0;
  for (const std::string& name : names_in(devices)) {
    const std::size_t at = name.find(".nvdla");
    count += at != std::string::npos && at + 6 < name.size() && name[at + 6] >= '0' && name[at + 6] <= '9';
  }
  return count;
}

// -- the store ----------------------------------------------------------------------------------------

std::string store() {
  const auto set = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value == nullptr ? "" : value);
  };
  if (!set("TANDEM_PLANS").empty()) return set("TANDEM_PLANS");
  return (set("XDG_CACHE_HOME").empty() ? set("HOME") + "/.cache" : set("XDG_CACHE_HOME")) + "/tandem/plans";
}

std::optional<json::Value> record_at(const std::string& path) {
  const std::optional<std::string> text = bytes_of_file(path, kMaxRecordBytes);
  if (!text) return std::nullopt;
  try {
    json::Value record = json::parse(*text);
    if (record.kind != json::Kind::object) return std::nullopt;
    const json::Value *format = record.find("format"), *sha256 = record.find("sha256");
    if (format == nullptr || format->kind != json::Kind::integer || format->integer != kFormat) return std::nullopt;
    if (sha256 == nullptr || sha256->kind != json::Kind::text) return std::nullopt;
    return record;
  } catch (const EngineError&) {  // interrupted, or of another release: prepare again
    return std::nullopt;
  }
}

// What Python's package of this TensorRT may call itself: its metadata can have a fourth number, as it stands in
// the records that were made with it.
std::vector<std::string> names_of(const std::string& tensorrt, const std::string& folder) {
  std::vector<std::string> names{tensorrt};
  for (const std::string& file : names_in(folder)) {
    if (file.size() < 5 || file.compare(file.size() - 5, 5, ".json") != 0) continue;
    const std::optional<json::Value> record = record_at(folder + "/" + file);
    const json::Value* board = record ? record->find("board") : nullptr;
    const json::Value* name = board != nullptr && board->kind == json::Kind::object ? board->find("tensorrt") : nullptr;
    if (name == nullptr || name->text.rfind(tensorrt + ".", 0) != 0) continue;
    if (std::find(names.begin(), names.end(), name->text) == names.end()) names.push_back(name->text);
  }
  return names;
}

const Form& form_for(const TensorRT& part, const std::string& tensorrt) {
  int number[3] = {0, 0, 0};
  std::sscanf(tensorrt.c_str(), "%d.%d.%d", &number[0], &number[1], &number[2]);
  const Release* release = std::begin(kReleases);
  while (!std::lexicographical_compare(number, number + 3, release->end, release->end + 3)) ++release;
  if (release->form == nullptr) refuse_session("TensorRT ", tensorrt, " has no DLA here: ", release->why);
  const bool ranged = release->form == std::string_view("ranged");
  const std::string& problem = ranged ? part.ranged_problem : part.typed_problem;
  if (!problem.empty()) refuse_session(problem);
  return ranged ? part.ranged : part.typed;
}

}  // namespace

Board read_board(const std::string& root, const std::string& tensorrt) {
  Board board;
  board.tensorrt = tensorrt;
  for (const std::string folder : {"nvidia", "tegra"}) {
    if (!board.dla_compiler.empty()) break;
    const auto bytes = bytes_of_file(root + "/usr/lib/aarch64-linux-gnu/" + folder + "/libnvdla_compiler.so");
    if (bytes) board.dla_compiler = digest_of(*bytes);
  }
  char major[16], revision[32];
  const std::string release = text_of_file(root + "/etc/nv_tegra_release");
  if (std::sscanf(release.c_str(), "# R%15[0-9] (release), REVISION: %31[0-9.]", major, revision) == 2)
    board.l4t = std::string(major) + "." + revision;
  board.soc = soc_of(text_of_file(root + "/proc/device-tree/compatible"));
  board.dla_cores = cores_below(root + "/sys/bus/platform/devices");
  const std::string status = text_of_file(root + "/var/lib/nvpmodel/status");
  if (const std::size_t at = status.find("pmode:"); at != std::string::npos) {
    const std::size_t first = at + 6, end = status.find_first_not_of("0123456789", first);
    board.power_mode = status.substr(first, end == std::string::npos ? end : end - first);
  }
  return board;
}

std::string plan_key(Engine& engine, const TensorRT& part, const Board& board) {
  const Form& form = form_for(part, board.tensorrt);
  Sha256 total;
  total.update("{\"dla_compiler\":" + json_of(board.dla_compiler) + ",\"dla_cores\":" + std::to_string(board.dla_cores) +
               ",\"l4t\":" + json_of(board.l4t) + ",\"power_mode\":" + json_of(board.power_mode) +
               ",\"soc\":" + json_of(board.soc) + ",\"tensorrt\":" + json_of(board.tensorrt) + "}");
  total.update("[" + std::to_string(kFormat) + "," + json_of(part.inputs) + "," + json_of(part.outputs) + "," +
               json_of(part.ranges) + "]");
  total.update("[{\"model\":" + json_of(form.model) + ",\"weights\":" + json_of(form.weights) + "}," +
               json_of(part.half_nodes) + "]");
  total.update(engine.section(form.model));
  for (const Weight& weight : form.weights) {
    total.update(engine.section(weight.entry));
    if (weight.scales) total.update(engine.section(*weight.scales));
  }
  return total.hex().substr(0, kKeyDigits);
}

FinishedPlan read_plan(Engine& engine, const TensorRT& part, const std::string& tensorrt) {
  const std::string folder = store();
  const std::string prepare = "run `tandem-agent prepare " + engine.path() + "`";
  Board board = read_board("/", tensorrt);
  for (const std::string& name : names_of(tensorrt, folder)) {
    board.tensorrt = name;
    const std::string path = folder + "/" + plan_key(engine, part, board);
    const std::optional<json::Value> record = record_at(path + ".json");
    if (!record) continue;
    const json::Value *problem = record->find("problem"), *fallback = record->find("fallback");
    if (problem != nullptr && problem->kind == json::Kind::text)
      refuse_session("TensorRT refused it on this board: ", problem->text);
    std::optional<std::string> bytes = bytes_of_file(path + ".plan");
    if (!bytes || digest_of(*bytes) != record->find("sha256")->text) refuse_session("its plan is damaged: ", prepare);
    return {std::move(*bytes), fallback != nullptr && fallback->boolean};
  }
  refuse_session("it has no plan for this board as it is (TensorRT ", tensorrt,
                 board.l4t.empty() ? "" : ", L4T " + board.l4t, "): ", prepare);
}

}  // namespace tandem::internal
