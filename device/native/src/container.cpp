#include "container.hpp"

#define XXH_INLINE_ALL
#include <xxhash.h>
static_assert(XXH_VERSION_NUMBER >= 800, "XXH3 of older versions gives other checksums");

#include <algorithm>
#include <cstdio>

#include "json.hpp"

namespace tandem::internal {
namespace {

constexpr std::size_t kPrefixBytes = 8;
constexpr std::size_t kMaxHeaderBytes = 16 * 1024 * 1024;
constexpr std::size_t kMaxEntries = 65'536;
constexpr std::size_t kMaxJsonValues = 1'000'000;
constexpr Int kMaxSize = (Int{1} << 63) - 1;
constexpr std::string_view kMetadata = "__metadata__";
constexpr std::string_view kManifest = "tandem";
constexpr std::string_view kChecksums = "checksums";
constexpr std::string_view kAlgorithm = "xxh3_64";
constexpr std::string_view kMark = "\"checksums\":\"xxh3_64 ";
constexpr std::size_t kDigits = 16;

std::string hex(XXH64_hash_t hash) {
  char digits[kDigits + 1];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(hash));
  return digits;
}

std::int64_t size_of(const json::Value& value, const std::string& name) {
  if (value.kind != json::Kind::integer || value.integer < 0 || value.integer > kMaxSize)
    refuse("the header is not valid: entry ", quoted(name), " has a size that is no whole number "
           "from 0 to ", kMaxSize);
  return static_cast<std::int64_t>(value.integer);
}

Entry read_entry(const std::string& name, const json::Value& row) {
  const json::Value* dtype = row.find("dtype");
  const json::Value* shape = row.find("shape");
  const json::Value* offsets = row.find("data_offsets");
  if (!dtype || !shape || !offsets || row.keys.size() != 3 || dtype->kind != json::Kind::text ||
      shape->kind != json::Kind::array || offsets->kind != json::Kind::array ||
      offsets->items.size() != 2)
    refuse("the header is not valid: entry ", quoted(name), " has not just dtype, shape and two "
           "data_offsets");
  Entry entry{name, -1, {}, size_of(offsets->items[0], name), size_of(offsets->items[1], name)};
  for (int i = 0; i < static_cast<int>(std::size(kDtypes)); ++i)
    if (dtype->text == kDtypes[i].stored) entry.dtype = i;
  if (entry.dtype < 0) refuse("entry ", quoted(name), " has the unknown dtype ", quoted(dtype->text));
  if (shape->items.size() > kMaxRank)
    refuse("entry ", quoted(name), " has ", shape->items.size(), " dimensions, the limit is ", kMaxRank);
  Int bytes = kDtypes[entry.dtype].bytes;
  for (const json::Value& dim : shape->items) {
    entry.shape.push_back(size_of(dim, name));
    bytes *= entry.shape.back();
    if (bytes > kMaxSize) refuse("entry ", quoted(name), " has a shape of more than ", kMaxSize, " bytes");
  }
  if (Int{entry.stop} - entry.start != bytes)
    refuse("entry ", quoted(name), " takes ", Int{entry.stop} - entry.start,
           " bytes, its dtype and shape need ", bytes);
  return entry;
}

void check_cover(const std::vector<Entry>& entries, std::size_t data_bytes) {
  std::vector<const Entry*> rows;
  for (const Entry& entry : entries) rows.push_back(&entry);
  std::stable_sort(rows.begin(), rows.end(), [](const Entry* a, const Entry* b) {
    return std::pair(a->start, a->stop) < std::pair(b->start, b->stop);
  });
  std::int64_t end = 0;
  for (const Entry* entry : rows) {
    if (entry->start != end)
      refuse("entry ", quoted(entry->name), " starts at byte ", entry->start,
             " of the data, the entry before it ends at ", end);
    end = entry->stop;
  }
  if (end != static_cast<std::int64_t>(data_bytes))
    refuse("the entries take ", end, " bytes, the file holds ", data_bytes,
           " after the header: it is cut off or has bytes that belong to no entry");
}

// Reads the checksums and checks that of the length and header, `head`.
std::vector<std::string> read_checksums(const std::string& stated, std::string_view head,
                                        std::size_t entries) {
  std::vector<std::string> words;
  std::size_t at = 0;
  for (std::size_t space; (space = stated.find(' ', at)) != std::string::npos; at = space + 1)
    words.push_back(stated.substr(at, space - at));
  words.push_back(stated.substr(at));
  if (words[0] != kAlgorithm || words.size() != entries + 2)
    refuse("it is damaged, or of a newer Tandem: it has ", words.size() - 1, " checksums of kind ",
           quoted(words[0].substr(0, 40)), ", not ", entries + 1, " of ", kAlgorithm);
  const std::size_t mark = head.find(kMark);
  if (mark == std::string_view::npos || mark + kMark.size() + kDigits > head.size())
    refuse("it is damaged: the header has no place for its checksum");
  const std::size_t place = mark + kMark.size();
  std::string unsealed(head);
  unsealed.replace(place, kDigits, kDigits, '0');
  const std::string actual = hex(XXH3_64bits(unsealed.data(), unsealed.size()));
  if (head.substr(place, kDigits) != actual)
    refuse("it is damaged: its header at byte 0 (", head.size(), " bytes) has the checksum ", actual,
           ", written was ", words[1]);
  return {words.begin() + 2, words.end()};
}

}  // namespace

int dtype_named(std::string_view name) {
  for (int i = 0; i < static_cast<int>(std::size(kDtypes)); ++i)
    if (name == kDtypes[i].name) return i;
  return -1;
}

std::size_t header_bytes(std::string_view file) {
  if (file.size() < kPrefixBytes)
    refuse("it is no engine: it has ", file.size(), " bytes, an engine at least ", kPrefixBytes);
  std::uint64_t length = 0;
  for (std::size_t i = kPrefixBytes; i-- > 0;)
    length = length << 8 | static_cast<unsigned char>(file[i]);
  if (length > kMaxHeaderBytes)
    refuse("it is no engine: its header would be ", length, " bytes long, the limit is ", kMaxHeaderBytes);
  if (length > file.size() - kPrefixBytes)
    refuse("it is cut off: its header is ", length, " bytes long, the file has ",
           file.size() - kPrefixBytes, " after the length");
  return static_cast<std::size_t>(length);
}

Container read_container(std::string_view file) {
  const std::size_t length = header_bytes(file);
  const std::string_view header = file.substr(kPrefixBytes, length);
  if (header.substr(0, 1) != "{") refuse("it is no engine: its header does not start with '{'");
  const auto values = static_cast<std::size_t>(std::count_if(
      header.begin(), header.end(), [](char c) { return c == ',' || c == '[' || c == '{'; }));
  if (values > kMaxJsonValues)
    refuse("it is no engine: its header has ", values, " values, the limit is ", kMaxJsonValues);
  const json::Value table = json::parse(header);

  Container container;
  container.data_start = kPrefixBytes + length;
  std::string stated;
  const std::string* unknown = nullptr;
  bool has_manifest = false, has_checksums = false;
  const json::Value* metadata = table.find(kMetadata);
  if (metadata != nullptr) {
    if (metadata->kind != json::Kind::object) refuse("the header is not valid: its metadata is no object");
    for (std::size_t i = 0; i < metadata->keys.size(); ++i) {
      const std::string& key = metadata->keys[i];
      const json::Value& value = metadata->items[i];
      if (value.kind != json::Kind::text)
        refuse("the header is not valid: its metadata has ", quoted(key), " of ", name_of(value.kind));
      if (key == kManifest) {
        container.manifest = value.text;
        has_manifest = true;
      } else if (key == kChecksums) {
        stated = value.text;
        has_checksums = true;
      } else if (key != "format" && unknown == nullptr) {
        unknown = &key;
      }
    }
  }
  if (table.items.size() - (metadata != nullptr ? 1 : 0) > kMaxEntries)
    refuse("it has ", table.items.size(), " entries, the limit is ", kMaxEntries);
  for (std::size_t i = 0; i < table.keys.size(); ++i) {
    if (table.keys[i] == kMetadata) continue;
    container.index.emplace(table.keys[i], container.entries.size());
    container.entries.push_back(read_entry(table.keys[i], table.items[i]));
  }
  check_cover(container.entries, file.size() - container.data_start);
  // A flipped bit in the name of the checksums must not hide them.
  if (unknown != nullptr && has_manifest)
    refuse("it is damaged, or of a newer Tandem: its metadata has ", quoted(unknown->substr(0, 40)),
           ", known are tandem, checksums, format");
  if (has_checksums)
    container.checksums =
        read_checksums(stated, file.substr(0, container.data_start), container.entries.size());
  if (!has_manifest)
    refuse("it is a safetensors file but no engine: its metadata has no 'tandem'");
  return container;
}

void check_section(const Container& container, const Entry& entry, std::string_view file) {
  if (container.checksums.empty()) return;
  const std::size_t start = container.data_start + static_cast<std::size_t>(entry.start);
  const auto bytes = static_cast<std::size_t>(entry.bytes());
  const std::string actual = hex(XXH3_64bits(file.data() + start, bytes));
  const std::string& written =
      container.checksums[static_cast<std::size_t>(&entry - container.entries.data())];
  if (actual != written)
    refuse("it is damaged: section ", quoted(entry.name), " at byte ", start, " (", bytes,
           " bytes) has the checksum ", actual, ", written was ", written);
}

}  // namespace tandem::internal
