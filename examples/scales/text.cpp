#include "text.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/tensor.h>

#include <pacer/core/error.h>

#include "convergence/text/corpus.h"

namespace scales {
namespace {

constexpr int64_t kMostBytes = 2'000'000;
constexpr int64_t kLongest = 64;  // tokens of a sequence, for which the text must suffice
constexpr int64_t kLeast = 20 * kLongest;

using Pieces = std::vector<std::string>;

Pieces cut(const uint8_t* begin, const uint8_t* end, TextUnit unit) {
  Pieces pieces;
  bool in_word = false;
  for (; begin != end; ++begin) {
    const bool is_letter = std::isalpha(*begin) != 0 || *begin == '\'';
    const bool continues = unit == TextUnit::word && is_letter && in_word;
    in_word = is_letter;
    if (unit == TextUnit::word && std::isspace(*begin) != 0) continue;
    const char character = static_cast<char>(unit == TextUnit::word ? std::tolower(*begin) : *begin);
    if (continues) {
      pieces.back() += character;
    } else {
      pieces.emplace_back(1, character);
    }
  }
  return pieces;
}

// Numbers from 1 on, the most frequent first; 0 is for whatever has none.
std::map<std::string, int64_t> number_pieces(const Pieces& pieces, int64_t most) {
  std::map<std::string, int64_t> counts;
  for (const auto& piece : pieces) ++counts[piece];
  std::vector<std::pair<int64_t, std::string>> order;
  for (const auto& [piece, count] : counts) order.emplace_back(-count, piece);
  std::sort(order.begin(), order.end());
  if (static_cast<int64_t>(order.size()) >= most) order.resize(static_cast<size_t>(most - 1));
  std::map<std::string, int64_t> numbers;
  for (const auto& entry : order) numbers.emplace(entry.second, static_cast<int64_t>(numbers.size()) + 1);
  return numbers;
}

at::Tensor as_numbers(const Pieces& pieces, const std::map<std::string, int64_t>& numbers) {
  pacer::require(static_cast<int64_t>(pieces.size()) >= kLeast, "the text gives only ", pieces.size(),
                 " characters or words where at least ", kLeast,
                 " are needed; name a longer one with --data");
  std::vector<int64_t> row;
  for (const auto& piece : pieces) {
    const auto found = numbers.find(piece);
    row.push_back(found == numbers.end() ? 0 : found->second);
  }
  return at::tensor(row);
}

TokenBatch batch_at(const at::Tensor& tokens, const at::Tensor& starts, int64_t length) {
  const auto at_starts = starts.unsqueeze(1) + at::arange(length + 1, at::kLong);
  const auto rows = tokens.index({at_starts});
  return {rows.narrow(1, 0, length), rows.narrow(1, 1, length)};
}

}  // namespace

Text read_text(const std::string& path, TextUnit unit, int64_t most_words) {
  const auto corpus = convergence::read_corpus(path, kMostBytes, kLongest);
  const uint8_t* begin = corpus.bytes.data();
  const auto training = cut(begin, begin + corpus.training_bytes, unit);
  const auto held_out = cut(begin + corpus.training_bytes, begin + corpus.bytes.size(), unit);
  const int64_t most = unit == TextUnit::word ? most_words : 257;
  const auto numbers = number_pieces(training, most);
  return {as_numbers(training, numbers), as_numbers(held_out, numbers),
          static_cast<int64_t>(numbers.size()) + 1};
}

TokenBatch draw_batch(const at::Tensor& tokens, int64_t sequences, int64_t length, at::Generator generator) {
  const auto starts = at::randint(tokens.size(0) - length, {sequences}, std::move(generator), at::kLong);
  return batch_at(tokens, starts, length);
}

TokenBatch spread_batch(const at::Tensor& tokens, int64_t sequences, int64_t length) {
  const auto last = static_cast<double>(tokens.size(0) - length - 1);
  return batch_at(tokens, at::linspace(0, last, sequences, at::kDouble).to(at::kLong), length);
}

}  // namespace scales
