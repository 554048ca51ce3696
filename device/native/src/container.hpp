// The safetensors container of an engine, and the checksums in its metadata.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "text.hpp"

namespace tandem::internal {

struct DtypeRow {
  const char* stored;  // in the file
  const char* name;    // in the manifest: numpy's
  int bytes;
};

// In the order of tandem_dtype.
inline constexpr DtypeRow kDtypes[] = {
    {"BOOL", "bool", 1}, {"I8", "int8", 1},     {"U8", "uint8", 1},   {"I16", "int16", 2},
    {"U16", "uint16", 2}, {"F16", "float16", 2}, {"I32", "int32", 4},  {"U32", "uint32", 4},
    {"F32", "float32", 4}, {"I64", "int64", 8},  {"U64", "uint64", 8}, {"F64", "float64", 8},
};

// Row of kDtypes, -1 for an unknown name.
int dtype_named(std::string_view name);

inline constexpr int kMaxRank = 32;

// One array of the file. `start` and `stop` count from the first array, in bytes.
struct Entry {
  std::string name;
  int dtype;
  std::vector<std::int64_t> shape;
  std::int64_t start;
  std::int64_t stop;

  std::int64_t bytes() const { return stop - start; }
  bool is_blob() const { return kDtypes[dtype].name == std::string_view("uint8") && shape.size() == 1; }
};

struct Container {
  std::vector<Entry> entries;  // in the order of the header
  std::unordered_map<std::string, std::size_t> index;
  std::string manifest;                 // JSON
  std::vector<std::string> checksums;   // of the entries, in hex; empty: the file has none
  std::size_t data_start = 0;

  const Entry* find(const std::string& name) const {
    const auto row = index.find(name);
    return row == index.end() ? nullptr : &entries[row->second];
  }
};

// The bytes of the header behind the first 8 of a file. Throws EngineError.
std::size_t header_bytes(std::string_view file);

// Reads the length, the header and its checksum; the arrays must cover the rest of the file.
Container read_container(std::string_view file);

// Throws EngineError unless the bytes of an entry are those that were written.
void check_section(const Container& container, const Entry& entry, std::string_view file);

}  // namespace tandem::internal
