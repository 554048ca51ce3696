#include "formula.hpp"

namespace tandem::internal {
namespace {

constexpr std::size_t kMaxCharacters = 2000;
constexpr std::size_t kMaxDigits = 18;
constexpr Int kMaxValue = Int{1} << 62;

enum class Op { number, dimension, add, subtract, multiply, divide, open, close };

struct Token {
  Op op;
  Int value = 0;
};

int precedence(Op op) {
  if (op == Op::add || op == Op::subtract) return 1;
  if (op == Op::multiply || op == Op::divide) return 2;
  return 0;
}

std::vector<Token> tokens_of(const std::string& text) {
  if (text.size() > kMaxCharacters)
    refuse("a formula has ", text.size(), " characters, the limit is ", kMaxCharacters);
  std::vector<Token> tokens;
  int open_brackets = 0;
  bool wants_value = true;
  for (std::size_t at = 0; at < text.size();) {
    Token token{Op::number};
    const bool dimension = text[at] == 'd';
    std::size_t digit = at + (dimension ? 1 : 0);
    const std::size_t first = digit;
    while (digit < text.size() && digit - first < kMaxDigits && text[digit] >= '0' && text[digit] <= '9')
      token.value = token.value * 10 + (text[digit++] - '0');
    if (digit > first) {
      token.op = dimension ? Op::dimension : Op::number;
      at = digit;
    } else {
      const char c = text[at++];
      if (c == '/' && at < text.size() && text[at] == '/') {
        token.op = Op::divide;
        ++at;
      } else if (c == '+') {
        token.op = Op::add;
      } else if (c == '-') {
        token.op = Op::subtract;
      } else if (c == '*') {
        token.op = Op::multiply;
      } else if (c == '(') {
        token.op = Op::open;
      } else if (c == ')') {
        token.op = Op::close;
      } else {
        refuse(quoted(text), " is no formula");
      }
    }
    const bool after_value = precedence(token.op) > 0 || token.op == Op::close;
    if (wants_value == after_value) refuse(quoted(text), " is no formula");
    open_brackets += token.op == Op::open ? 1 : token.op == Op::close ? -1 : 0;
    if (open_brackets < 0) refuse(quoted(text), " is no formula");
    wants_value = token.op == Op::open || precedence(token.op) > 0;
    tokens.push_back(token);
  }
  if (wants_value || open_brackets != 0) refuse(quoted(text), " is no formula");
  return tokens;
}

// Dijkstra's shunting yard.
std::vector<Token> postfix_of(const std::string& text) {
  std::vector<Token> postfix, operators;
  const auto move_last = [&] {
    postfix.push_back(operators.back());
    operators.pop_back();
  };
  for (const Token& token : tokens_of(text)) {
    if (token.op == Op::open) {
      operators.push_back(token);
    } else if (token.op == Op::close) {
      while (operators.back().op != Op::open) move_last();
      operators.pop_back();
    } else if (precedence(token.op) > 0) {
      while (!operators.empty() && precedence(operators.back().op) >= precedence(token.op)) move_last();
      operators.push_back(token);
    } else {
      postfix.push_back(token);
    }
  }
  while (!operators.empty()) move_last();
  return postfix;
}

Int apply(Op op, Int first, Int second, const std::string& text) {
  if (op == Op::divide && second < 1) refuse(quoted(text), " divides by ", second);
  Int value = 0;
  switch (op) {
    case Op::add:
      value = first + second;
      break;
    case Op::subtract:
      value = first - second;
      break;
    case Op::multiply:
      value = first * second;
      break;
    default:  // rounds down
      value = first / second - (first % second < 0 ? 1 : 0);
  }
  if (value > kMaxValue || value < -kMaxValue) refuse(quoted(text), " is beyond 2^62");
  return value;
}

}  // namespace

Int evaluate(const Amount& amount, const std::vector<Int>& point) {
  if (!amount.is_formula) return amount.number;
  std::vector<Int> stack;
  for (const Token& token : postfix_of(amount.formula)) {
    if (token.op == Op::number) {
      stack.push_back(token.value);
    } else if (token.op == Op::dimension) {
      if (token.value >= static_cast<Int>(point.size()))
        refuse(quoted(amount.formula), " has d", token.value, "; there are ", point.size(), " dimensions");
      stack.push_back(point[static_cast<std::size_t>(token.value)]);
    } else {
      const Int right = stack.back();
      stack.pop_back();
      stack.back() = apply(token.op, stack.back(), right, amount.formula);
    }
  }
  return stack.front();
}

}  // namespace tandem::internal
