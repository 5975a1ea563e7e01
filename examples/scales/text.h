// The text as numbers of characters or of words, split into what trains and what is held out, and batches of
// it. Knows no model.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

namespace scales {

enum class TextUnit { character, word };

struct Text {
  at::Tensor training, held_out;  // int64, each one long row
  int64_t vocabulary = 0;         // numbers are in [0, vocabulary)
};

// Tokens (sequences, length) and those that follow them, of the same shape.
using TokenBatch = std::pair<at::Tensor, at::Tensor>;

// Reads a file or folder, or LibTorch's headers where `path` is empty. Characters are all that occur. Words
// are runs of letters in lower case, and single characters otherwise without white space: the most frequent
// `most_words - 1` of the training part, and one number for all others. The last tenth of the bytes is held
// out. Throws pacer::InvalidArgument for what cannot be read or is too short.
Text read_text(const std::string& path, TextUnit unit, int64_t most_words);

// Sequences from places that the generator draws.
TokenBatch draw_batch(const at::Tensor& tokens, int64_t sequences, int64_t length, at::Generator generator);

// Sequences spread evenly, the same ones at every call.
TokenBatch spread_batch(const at::Tensor& tokens, int64_t sequences, int64_t length);

}  // namespace scales
