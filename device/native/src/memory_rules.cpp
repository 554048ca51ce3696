// The rules for the crossings and the memory plan of a manifest.
#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "rules.hpp"

namespace tandem::internal {
namespace {

constexpr Int kArenaSlack = 4096;  // bytes that a memory plan may lose to alignment for each buffer

struct Due {
  std::string source;
  std::set<std::string> targets;
};

// Each tensor that passes to another processor.
std::map<std::string, Due> due_crossings(const Facts& facts) {
  const auto& segments = facts.manifest.segments;
  std::map<std::string, Due> due;
  for (const auto& [name, producer] : facts.made) {
    const auto readers = facts.read_by.find(name);
    if (producer < 0 || readers == facts.read_by.end()) continue;
    const Segment& source = segments[static_cast<std::size_t>(producer)];
    Due row{source.name, {}};
    for (const long number : readers->second) {
      if (number >= static_cast<long>(segments.size())) continue;
      const Segment& reader = segments[static_cast<std::size_t>(number)];
      if (reader.processor != source.processor) row.targets.insert(reader.name);
    }
    if (!row.targets.empty()) due.emplace(name, std::move(row));
  }
  return due;
}

std::string bytes_text(const std::optional<Int>& bytes) { return bytes ? decimal(*bytes) : "no known"; }

}  // namespace

void check_crossings(const Facts& facts) {
  std::map<std::string, Due> due = due_crossings(facts);
  for (const Crossing& crossing : facts.manifest.crossings) {
    const std::string where = "crossing " + quoted(crossing.tensor);
    const auto row = due.find(crossing.tensor);
    if (row == due.end() || crossing.source != row->second.source ||
        std::set<std::string>(crossing.targets.begin(), crossing.targets.end()) != row->second.targets)
      refuse(where, " goes from ", quoted(crossing.source), " to ", crossing.targets.size(),
             " segments, which the segments do not say");
    const std::optional<Int> bytes = facts.largest_bytes(facts.tensor(crossing.tensor));
    if (crossing.bytes != bytes)
      refuse(where, " has ", bytes_text(crossing.bytes), " bytes, its largest shape has ", bytes_text(bytes));
    due.erase(row);
  }
  if (!due.empty())
    refuse("tensor ", quoted(due.begin()->first), " of segment ", quoted(due.begin()->second.source),
           " changes processor but is not a crossing");
}

void check_buffers(const Facts& facts) {
  const Manifest& manifest = facts.manifest;
  Int max_bytes = 0;
  for (const Buffer& buffer : manifest.buffers) {
    const std::string where = "the buffer of " + quoted(buffer.tensor);
    if (!facts.tensors.count(buffer.tensor) || !facts.made_by.count(buffer.tensor))
      refuse("memory has a buffer for ", quoted(buffer.tensor), ", which is not a tensor that anything makes");
    const std::optional<Int> bytes = facts.largest_bytes(facts.tensor(buffer.tensor));
    if (bytes != buffer.bytes)
      refuse(where, " has ", buffer.bytes, " bytes, its largest shape has ", bytes_text(bytes));
    if (buffer.offset < 0 || buffer.offset % kArenaAlignment != 0)
      refuse(where, " starts at ", buffer.offset, "; it must be a multiple of ", kArenaAlignment);
    if (buffer.offset + buffer.bytes > manifest.arena_bytes)
      refuse(where, " ends at ", buffer.offset + buffer.bytes, ", the arena at ", manifest.arena_bytes);
    max_bytes += buffer.bytes + kArenaSlack;
  }
  if (manifest.arena_bytes < 0 || manifest.arena_bytes > max_bytes)
    refuse("the arena has ", manifest.arena_bytes, " bytes, its buffers need no more than ", max_bytes);
}

void check_overlaps(const Facts& facts) {
  // `alive` holds the live buffers by offset. They never overlap, so a new one is compared with its
  // two neighbours only.
  using Item = std::tuple<Int, Int, std::string>;
  const auto segments = static_cast<long>(facts.manifest.segments.size());
  std::map<long, std::vector<Item>> births, deaths;
  for (const Buffer& buffer : facts.manifest.buffers) {
    const Item item{buffer.offset, buffer.offset + buffer.bytes, buffer.tensor};
    const long birth = facts.made_by.at(buffer.tensor);
    long death = birth;
    if (const auto readers = facts.read_by.find(buffer.tensor); readers != facts.read_by.end())
      death = std::max(death, *std::max_element(readers->second.begin(), readers->second.end()));
    births[birth].push_back(item);
    deaths[death].push_back(item);
  }
  std::set<Item> alive;
  const auto check = [](const Item& item, const Item& neighbour) {
    if (std::get<0>(item) < std::get<1>(neighbour) && std::get<0>(neighbour) < std::get<1>(item))
      refuse("the buffers of ", quoted(std::get<2>(item)), " and ", quoted(std::get<2>(neighbour)),
             " overlap from ", std::max(std::get<0>(item), std::get<0>(neighbour)), " while both are in use");
  };
  for (long position = -1; position <= segments; ++position) {
    for (const Item& item : births[position]) {
      const auto after = alive.lower_bound(item);
      if (after != alive.end()) check(item, *after);
      if (after != alive.begin()) check(item, *std::prev(after));
      alive.insert(item);
    }
    if (position < segments)
      for (const Item& item : deaths[position]) alive.erase(item);
  }
}

}  // namespace tandem::internal
