// Options of a CompressedAllReduce, the mean over ranks of a vector that travels as signs
// (compressed_all_reduce.h).
#pragma once

#include <cstdint>
#include <optional>

#include <torch/arg.h>

#include <pacer/kernels/choices.h>

namespace pacer {

struct CompressionOptions {
  CompressionOptions() = default;
  // What a sign stands for: the root of the mean square (the paper's), or the mean magnitude.
  TORCH_ARG(ScaleNorm, scale) = ScaleNorm::rms;
  // A scale for each 2,048 elements instead of one for the buffer and one for each chunk: finer, 1.6 % more
  // bytes.
  TORCH_ARG(bool, block_scales) = false;
  // With a single rank there is nothing to save and buffers stay as they are; true: rounded to signs all the
  // same, with both errors, for tests and studies.
  TORCH_ARG(bool, compress_alone) = false;
  // Nodes are the workers: inside a node buffers are averaged in full precision, in rank order, and signs
  // travel between nodes only, W / ranks_per_node() instead of W workers' of them. The same bits as without,
  // had one rank of each node brought its node's mean. With a single node nothing is compressed.
  TORCH_ARG(bool, hierarchical) = false;
  // Chunks are multiples of so many elements: 128 or more of them, 2,048 with block_scales. Nothing: the
  // least.
  TORCH_ARG(std::optional<int64_t>, alignment);
};

}  // namespace pacer
