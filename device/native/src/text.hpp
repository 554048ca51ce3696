// Errors as sentences: each names the object, the limit and the actual value.
// The library has its own classes in tandem::internal, apart from those of tandem.hpp: both may be linked into
// one program.
#pragma once
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace tandem::internal {

// Wide enough for every product of two sizes that the format can hold.
using Int = __int128;

inline std::string decimal(Int value) {
  if (value == 0) return "0";
  const bool negative = value < 0;
  std::string digits;
  for (; value != 0; value /= 10) {
    const int digit = static_cast<int>(value % 10);
    digits.insert(digits.begin(), static_cast<char>('0' + (digit < 0 ? -digit : digit)));
  }
  return negative ? "-" + digits : digits;
}

// Control characters of a name are escaped, so that a sentence stays one line.
inline std::string quoted(std::string_view name) {
  constexpr char kHex[] = "0123456789abcdef";
  std::string text = "'";
  for (const char letter : name) {
    const auto byte = static_cast<unsigned char>(letter);
    if (byte < 0x20 || byte == 0x7f)
      text.append({'\\', 'x', kHex[byte / 16], kHex[byte % 16]});
    else
      text += letter;
  }
  return text + "'";
}

inline std::string quoted(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + quoted(name);
  return text;
}

namespace detail {
inline void put(std::ostream& out, Int value) { out << decimal(value); }
template <typename T>
void put(std::ostream& out, const T& value) {
  out << value;
}
}  // namespace detail

template <typename... Parts>
std::string sentence(const Parts&... parts) {
  std::ostringstream out;
  (detail::put(out, parts), ...);
  return out.str();
}

// The file is no engine, is damaged, or breaks a rule.
struct EngineError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// An engine cannot run here, or what was given to it does not fit.
struct SessionError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <typename... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  throw EngineError(sentence(parts...));
}

template <typename... Parts>
[[noreturn]] void refuse_session(const Parts&... parts) {
  throw SessionError(sentence(parts...));
}

}  // namespace tandem::internal
