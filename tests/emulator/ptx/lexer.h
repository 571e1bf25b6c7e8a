// Characters to words. PTX words depend on where they stand (an opcode holds dots and ::), so the parser asks for a
// kind.
#pragma once

#include <cctype>
#include <cstdlib>
#include <string>

#include "syntax.h"

namespace emulator {

class Lexer {
 public:
  explicit Lexer(const std::string& text) : text_(text) { skip(); }

  bool at_end() const { return position_ >= text_.size(); }
  char peek() const { return at_end() ? '\0' : text_[position_]; }
  char peek_at(size_t distance) const {
    return position_ + distance < text_.size() ? text_[position_ + distance] : '\0';
  }
  int line() const { return line_; }

  bool take(char c) {
    if (peek() != c) return false;
    advance(1);
    return true;
  }
  void expect(char c) {
    if (!take(c)) fail(std::string("'") + c + "' expected");
  }

  // A name: registers, labels, variables. Dots belong to it only in special registers such as %tid.x.
  std::string name() {
    size_t end = position_;
    while (end < text_.size() && is_name(text_[end])) ++end;
    if (end < text_.size() && text_[end] == '.' && text_[position_] == '%') {
      ++end;
      while (end < text_.size() && is_name(text_[end])) ++end;
    }
    return cut(end);
  }
  // .name alone: what follows, as in .reg.b32, is the next one.
  std::string directive() {
    size_t end = position_ + 1;
    while (end < text_.size() && is_name(text_[end])) ++end;
    return cut(end);
  }
  // An opcode with its suffixes.
  std::string dotted() {
    size_t end = position_;
    while (end < text_.size() && (is_name(text_[end]) || text_[end] == '.' || text_[end] == ':')) {
      if (text_[end] == ':' && !(text_[end + 1] == ':' || text_[end - 1] == ':')) break;
      ++end;
    }
    return cut(end);
  }
  std::string quoted() {
    expect('"');
    size_t end = text_.find('"', position_);
    if (end == std::string::npos) fail("string without an end");
    std::string found = text_.substr(position_, end - position_);
    advance(end + 1 - position_);
    return found;
  }
  bool at_number() const { return std::isdigit(peek()) || (peek() == '-' && std::isdigit(peek_at(1))); }

  Expression number() {
    Expression number;
    const bool minus = take('-');
    const char kind = peek() == '0' ? static_cast<char>(std::tolower(peek_at(1))) : '\0';
    size_t end = position_;
    while (end < text_.size() && (std::isalnum(text_[end]) || text_[end] == '.' ||
                                  ((text_[end] == '+' || text_[end] == '-') && kind != 'x' && kind != 'f' &&
                                   kind != 'd' && (text_[end - 1] == 'e' || text_[end - 1] == 'E'))))
      ++end;
    std::string word = cut(end);
    if (kind == 'f' || kind == 'd') {
      number.kind = kind == 'f' ? Expression::Kind::real32 : Expression::Kind::real64;
      number.value = static_cast<int64_t>(std::strtoull(word.c_str() + 2, nullptr, 16));
      if (minus) number.value ^= kind == 'f' ? int64_t{1} << 31 : INT64_MIN;
    } else if (word.find('.') != std::string::npos) {
      number.kind = Expression::Kind::real64;
      const double value = (minus ? -1 : 1) * std::strtod(word.c_str(), nullptr);
      __builtin_memcpy(&number.value, &value, 8);
    } else {
      number.kind = Expression::Kind::integer;
      while (!word.empty() && (word.back() == 'U' || word.back() == 'u')) word.pop_back();
      const uint64_t value =
          kind == 'b' ? std::strtoull(word.c_str() + 2, nullptr, 2) : std::strtoull(word.c_str(), nullptr, 0);
      number.value = static_cast<int64_t>(minus ? 0 - value : value);
    }
    return number;
  }

  bool at_label() const {  // name:
    size_t end = position_;
    while (end < text_.size() && is_name(text_[end])) ++end;
    while (end < text_.size() && (text_[end] == ' ' || text_[end] == '\t')) ++end;
    return end > position_ && end + 1 < text_.size() && text_[end] == ':' && text_[end + 1] != ':';
  }
  void skip_character() { advance(1); }

  [[noreturn]] void fail(const std::string& why) const {
    throw Fault("PTX line " + std::to_string(line_) + ": " + why + ": " + line_text());
  }
  std::string line_text() const {
    const size_t begin = text_.rfind('\n', position_ ? position_ - 1 : 0);
    const size_t from = begin == std::string::npos ? 0 : begin + 1;
    return text_.substr(from, text_.find('\n', position_) - from);
  }

 private:
  static bool is_name(char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%';
  }

  std::string cut(size_t end) {
    if (end == position_) fail("a word expected");
    std::string word = text_.substr(position_, end - position_);
    advance(end - position_);
    return word;
  }
  void advance(size_t count) {
    for (; count; --count) line_ += text_[position_++] == '\n';
    skip();
  }
  void skip() {  // blanks and comments
    while (position_ < text_.size()) {
      if (std::isspace(static_cast<unsigned char>(text_[position_]))) {
        line_ += text_[position_++] == '\n';
      } else if (text_.compare(position_, 2, "//") == 0) {
        while (position_ < text_.size() && text_[position_] != '\n') ++position_;
      } else if (text_.compare(position_, 2, "/*") == 0) {
        size_t end = text_.find("*/", position_ + 2);
        end = end == std::string::npos ? text_.size() : end + 2;
        while (position_ < end) line_ += text_[position_++] == '\n';
      } else {
        break;
      }
    }
  }

  const std::string& text_;
  size_t position_ = 0;
  int line_ = 1;
};

}  // namespace emulator
