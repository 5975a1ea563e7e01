// The text of the study as bytes, and its split into a training and a validation part. Knows files and
// folders, nothing of tensors. The bytes depend on names and contents only, never on the order of the file
// system.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace convergence {

struct Corpus {
  std::vector<uint8_t> bytes;
  int64_t training_bytes = 0;        // bytes[0, training_bytes) train
  int64_t validation_sequences = 0;  // whole sequences that the rest holds, each followed by one more byte
  std::string description;           // "8,000,000 bytes of 1,234 files in /usr/include"
};

// Reads `path`, a file or a folder, up to `limit` bytes; an empty path is the folder of LibTorch's headers.
// A folder gives all its text files (no hidden ones, none with a zero byte), recursively, in an order drawn
// from a hash of their relative names, so that every part of the text is a fair sample of the folder. The
// last tenth, rounded down to whole sequences, is for validation. Throws pacer::InvalidArgument where the
// path is missing, unreadable, empty, or too small for `sequence`.
Corpus read_corpus(const std::string& path, int64_t limit, int64_t sequence);

// Where the sequences of training step `step` begin: `batch` offsets in [0, training_bytes - sequence), a
// pure function of its arguments, so that every arm sees the same batches.
std::vector<int64_t> batch_offsets(uint64_t seed, int64_t step, int64_t batch, const Corpus& corpus,
                                   int64_t sequence);

// At most `count` offsets of validation sequences, spread evenly over the validation part.
std::vector<int64_t> validation_offsets(const Corpus& corpus, int64_t count, int64_t sequence);

}  // namespace convergence
