// One JSON object a line on stdout.
#pragma once

#include <cstdio>
#include <sstream>
#include <string>
#include <vector>

namespace test {

inline std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      result += '\\';
    }
    result += c;
  }
  return result + '"';
}

template <typename Values>
std::string list(const Values& values) {
  std::ostringstream text;
  text << "[";
  bool first = true;
  for (const auto& value : values) {
    text << (first ? "" : ", ") << value;
    first = false;
  }
  text << "]";
  return text.str();
}

class Line {
 public:
  explicit Line(const std::string& event) { text_ << "{\"event\": " << quoted(event); }

  template <typename Value>
  Line& add(const std::string& name, const Value& value) {  // a number, or JSON already
    text_ << ", " << quoted(name) << ": " << value;
    return *this;
  }
  Line& text(const std::string& name, const std::string& value) { return add(name, quoted(value)); }

  ~Line() {
    text_ << "}";
    std::puts(text_.str().c_str());
    std::fflush(stdout);
  }

 private:
  std::ostringstream text_;
};

}  // namespace test
