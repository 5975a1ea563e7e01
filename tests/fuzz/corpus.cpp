#include "fuzz/corpus.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>

#include "fuzz/harness.h"

namespace pacer::fuzz {
namespace {

std::string escaped(const std::string& input) {
  std::string line;
  for (const char c : input) {
    const bool prints = ' ' <= c && c <= '~' && c != '\\' && (c != '#' || !line.empty());
    char code[5];
    std::snprintf(code, sizeof code, "\\x%02x", static_cast<unsigned char>(c));
    line += prints ? std::string(1, c) : code;
  }
  return line;
}

// `\"` and `\\` are of dictionaries.
std::string unescaped(const std::string& line) {
  std::string input;
  for (size_t i = 0; i < line.size(); ++i) {
    if (line[i] != '\\') {
      input += line[i];
    } else if (line[i + 1] == 'x') {
      input += static_cast<char>(std::stoi(line.substr(i + 2, 2), nullptr, 16));
      i += 3;
    } else {
      input += line[++i];
    }
  }
  return input;
}

std::vector<std::string> lines_of(const std::string& path) {
  std::ifstream file(path);
  if (!file.is_open()) throw std::runtime_error("cannot read " + path);
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) {
    if (!line.empty() && line.front() != '#') lines.push_back(line);
  }
  return lines;
}

}  // namespace

std::vector<std::string> read_corpus(const std::string& path) {
  std::vector<std::string> inputs;
  for (const std::string& line : lines_of(path)) inputs.push_back(unescaped(line));
  return inputs;
}

std::vector<std::string> read_dictionary(const std::string& path) {
  std::vector<std::string> words;
  for (const std::string& line : lines_of(path)) {
    const size_t begin = line.find('"') + 1, end = line.rfind('"');
    words.push_back(unescaped(line.substr(begin, end - begin)));
  }
  return words;
}

bool serve_corpus(const std::vector<std::string>& arguments) {
  if (arguments.size() == 3 && arguments[0] == "--unpack") {
    std::vector<std::string> inputs = seeds();
    for (std::string& input : read_corpus(arguments[1])) inputs.push_back(std::move(input));
    for (size_t i = 0; i < inputs.size(); ++i) {
      std::ofstream(arguments[2] + "/seed-" + std::to_string(i), std::ios::binary) << inputs[i];
    }
    return true;
  }
  if (arguments.size() != 2 || arguments[0] != "--pack") return false;
  std::vector<std::string> lines;
  for (const auto& file : std::filesystem::directory_iterator(arguments[1])) {
    std::ifstream content(file.path(), std::ios::binary);
    lines.push_back(escaped({std::istreambuf_iterator<char>(content), {}}));
  }
  std::sort(lines.begin(), lines.end());
  for (const std::string& line : lines) std::puts(line.c_str());
  return true;
}

}  // namespace pacer::fuzz
