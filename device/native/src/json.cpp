#include "json.hpp"

#include <charconv>
#include <cmath>
#include <unordered_set>

namespace tandem::internal::json {
namespace {

constexpr int kMaxDepth = 200;               // an engine's manifest has 12
constexpr std::size_t kMaxIntegerDigits = 4300;  // the limit of the Python reader
constexpr Int kClamp = Int{1} << 100;

class Parser {
 public:
  explicit Parser(std::string_view source) : source_(source) {}

  Value document() {
    Value value = element(0);
    skip_space();
    if (at_ != source_.size()) fail("trailing characters");
    return value;
  }

 private:
  [[noreturn]] void fail(std::string_view what) const { refuse("JSON: ", what, " (byte ", at_, ")"); }

  bool more() const { return at_ < source_.size(); }
  char peek() const { return more() ? source_[at_] : '\0'; }

  bool take(char expected) {
    if (!more() || source_[at_] != expected) return false;
    ++at_;
    return true;
  }

  void skip_space() {
    while (more() && (peek() == ' ' || peek() == '\t' || peek() == '\n' || peek() == '\r')) ++at_;
  }

  Value element(int depth) {
    if (depth > kMaxDepth) fail("too deep");
    skip_space();
    if (!more()) fail("it ends early");
    Value value;
    switch (peek()) {
      case '{':
        object(value, depth);
        break;
      case '[':
        array(value, depth);
        break;
      case '"':
        value.kind = Kind::text;
        value.text = text();
        break;
      case 't':
        literal("true");
        value.kind = Kind::boolean;
        value.boolean = true;
        break;
      case 'f':
        literal("false");
        value.kind = Kind::boolean;
        break;
      case 'n':
        literal("null");
        break;
      default:
        number(value);
    }
    return value;
  }

  void literal(std::string_view word) {
    if (source_.substr(at_, word.size()) != word) fail("invalid character");
    at_ += word.size();
  }

  void array(Value& value, int depth) {
    value.kind = Kind::array;
    ++at_;
    skip_space();
    if (take(']')) return;
    do {
      value.items.push_back(element(depth + 1));
      skip_space();
    } while (take(','));
    if (!take(']')) fail("expected ',' or ']'");
  }

  void object(Value& value, int depth) {
    value.kind = Kind::object;
    ++at_;
    skip_space();
    if (take('}')) return;
    std::unordered_set<std::string> seen;
    do {
      skip_space();
      if (peek() != '"') fail("object keys must be strings");
      std::string key = text();
      if (!seen.insert(key).second) refuse("JSON names ", quoted(key), " twice (byte ", at_, ")");
      skip_space();
      if (!take(':')) fail("expected ':'");
      value.keys.push_back(std::move(key));
      value.items.push_back(element(depth + 1));
      skip_space();
    } while (take(','));
    if (!take('}')) fail("expected ',' or '}'");
  }

  std::size_t digits() {
    const std::size_t start = at_;
    while (more() && peek() >= '0' && peek() <= '9') ++at_;
    return at_ - start;
  }

  void number(Value& value) {
    const std::size_t start = at_;
    take('-');
    const std::size_t first = at_;
    const std::size_t count = digits();
    if (count == 0) fail("invalid character");
    if (count > 1 && source_[first] == '0') fail("invalid number");
    value.kind = Kind::integer;
    if (take('.')) {
      value.kind = Kind::real;
      if (digits() == 0) fail("invalid number");
    }
    if (peek() == 'e' || peek() == 'E') {
      value.kind = Kind::real;
      ++at_;
      if (!take('+')) take('-');
      if (digits() == 0) fail("invalid number");
    }
    const std::string_view literal = source_.substr(start, at_ - start);
    value.real = real_of(literal);
    if (value.kind == Kind::integer) {
      if (count > kMaxIntegerDigits) fail("an integer has too many digits");
      value.integer = integer_of(literal);
    }
  }

  double real_of(std::string_view literal) const {
    double result = 0;
    const auto parsed = std::from_chars(literal.data(), literal.data() + literal.size(), result);
    if (parsed.ec != std::errc::result_out_of_range) return result;
    if (magnitude_of(literal) > 0) fail("number out of range");
    return literal.front() == '-' ? -0.0 : 0.0;
  }

  // The power of ten of a number that no double holds: above 0 it is too large, else too small.
  static long magnitude_of(std::string_view literal) {
    long power = 0, exponent = 0;
    bool leading = true, fraction = false;
    for (std::size_t i = 0; i < literal.size(); ++i) {
      const char c = literal[i];
      if (c == 'e' || c == 'E') {
        const bool negative = literal[i + 1] == '-';
        for (char digit : literal.substr(i + 1))
          if (digit >= '0' && digit <= '9' && exponent < 100'000'000)
            exponent = exponent * 10 + (digit - '0');
        if (negative) exponent = -exponent;
        break;
      }
      if (c == '.') fraction = true;
      if (c < '0' || c > '9') continue;
      leading = leading && c == '0';
      if (!fraction && !leading) ++power;
      if (fraction && leading) --power;
    }
    return power + exponent;
  }

  static Int integer_of(std::string_view literal) {
    const bool negative = literal.front() == '-';
    Int result = 0;
    for (char c : literal.substr(negative ? 1 : 0)) {
      result = result * 10 + (c - '0');
      if (result > kClamp) result = kClamp;
    }
    return negative ? -result : result;
  }

  unsigned hex4() {
    unsigned code = 0;
    for (int i = 0; i < 4; ++i, ++at_) {
      const char c = peek();
      if (c >= '0' && c <= '9')
        code = code * 16 + static_cast<unsigned>(c - '0');
      else if (c >= 'a' && c <= 'f')
        code = code * 16 + static_cast<unsigned>(c - 'a' + 10);
      else if (c >= 'A' && c <= 'F')
        code = code * 16 + static_cast<unsigned>(c - 'A' + 10);
      else
        fail("invalid escape in a string");
    }
    return code;
  }

  static void append_utf8(std::string& out, unsigned code) {
    const auto put = [&out](unsigned byte) { out.push_back(static_cast<char>(byte)); };
    if (code < 0x80) {
      put(code);
    } else if (code < 0x800) {
      put(0xC0 | code >> 6);
      put(0x80 | (code & 0x3F));
    } else if (code < 0x10000) {
      put(0xE0 | code >> 12);
      put(0x80 | (code >> 6 & 0x3F));
      put(0x80 | (code & 0x3F));
    } else {
      put(0xF0 | code >> 18);
      put(0x80 | (code >> 12 & 0x3F));
      put(0x80 | (code >> 6 & 0x3F));
      put(0x80 | (code & 0x3F));
    }
  }

  void escape(std::string& out) {
    const char c = peek();
    ++at_;
    switch (c) {
      case '"':
      case '\\':
      case '/':
        out.push_back(c);
        return;
      case 'b':
        out.push_back('\b');
        return;
      case 'f':
        out.push_back('\f');
        return;
      case 'n':
        out.push_back('\n');
        return;
      case 'r':
        out.push_back('\r');
        return;
      case 't':
        out.push_back('\t');
        return;
      case 'u':
        break;
      default:
        fail("invalid escape in a string");
    }
    unsigned code = hex4();
    if (code >= 0xDC00 && code < 0xE000) fail("half a surrogate pair");
    if (code >= 0xD800 && code < 0xDC00) {
      if (!take('\\') || !take('u')) fail("half a surrogate pair");
      const unsigned low = hex4();
      if (low < 0xDC00 || low >= 0xE000) fail("half a surrogate pair");
      code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
    }
    append_utf8(out, code);
  }

  // One character of more than one byte: no overlong form, no surrogate, nothing past U+10FFFF.
  void multibyte(std::string& out) {
    const auto lead = static_cast<unsigned char>(peek());
    const int count = lead >= 0xF0 ? 3 : lead >= 0xE0 ? 2 : 1;
    if (lead < 0xC2 || lead > 0xF4 || at_ + static_cast<std::size_t>(count) >= source_.size())
      fail("invalid UTF-8");
    const auto second = static_cast<unsigned char>(source_[at_ + 1]);
    if ((lead == 0xE0 && second < 0xA0) || (lead == 0xED && second > 0x9F) ||
        (lead == 0xF0 && second < 0x90) || (lead == 0xF4 && second > 0x8F))
      fail("invalid UTF-8");
    out.push_back(source_[at_++]);
    for (int i = 0; i < count; ++i, ++at_) {
      if ((static_cast<unsigned char>(peek()) & 0xC0) != 0x80) fail("invalid UTF-8");
      out.push_back(peek());
    }
  }

  std::string text() {
    std::string out;
    ++at_;
    while (true) {
      if (!more()) fail("a string has no end");
      const char c = peek();
      const auto byte = static_cast<unsigned char>(c);
      if (c == '"') {
        ++at_;
        return out;
      }
      if (byte < 0x20) fail("a control character in a string");
      if (c == '\\') {
        ++at_;
        if (!more()) fail("a string has no end");
        escape(out);
      } else if (byte < 0x80) {
        out.push_back(c);
        ++at_;
      } else {
        multibyte(out);
      }
    }
  }

  std::string_view source_;
  std::size_t at_ = 0;
};

}  // namespace

const Value* Value::find(std::string_view key) const {
  for (std::size_t i = 0; i < keys.size(); ++i)
    if (keys[i] == key) return &items[i];
  return nullptr;
}

const char* name_of(Kind kind) {
  static constexpr const char* kNames[] = {"null", "bool", "int", "float", "str", "array", "object"};
  return kNames[static_cast<int>(kind)];
}

Value parse(std::string_view source) { return Parser(source).document(); }

}  // namespace tandem::internal::json
