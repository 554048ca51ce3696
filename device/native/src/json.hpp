// A strict JSON reader (RFC 8259): no value out of range, no repeated key, no invalid UTF-8.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "text.hpp"

namespace tandem::internal::json {

enum class Kind { null, boolean, integer, real, text, array, object };

struct Value {
  Kind kind = Kind::null;
  bool boolean = false;
  Int integer = 0;  // clamped to +-2^100: far beyond every limit that a size is compared with
  double real = 0;  // of integers, too
  std::string text;
  std::vector<Value> items;       // of an array; of an object, in the order of `keys`
  std::vector<std::string> keys;  // unique

  const Value* find(std::string_view key) const;
};

const char* name_of(Kind kind);

// Throws EngineError, which says what is wrong at which byte.
Value parse(std::string_view source);

}  // namespace tandem::internal::json
