// Images with a class each: from a file, or drawn here.
#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>

struct Images {
  at::Tensor pixels;  // fp32 [count, side, side]
  at::Tensor labels;  // int64 [count], from 0

  int64_t count() const { return labels.size(0); }
};

// Pixels of both sets have the mean 0 and the deviation 1 of the training set.
struct ImageSet {
  Images train, test;
  int64_t side, classes;
};

// Reads train.images, train.labels, test.images and test.labels, all uint8, from a safetensors file, as
// digits.py writes it; of the training images the first `train`, all where that is 0. Throws
// pacer::InvalidArgument where the file has other tensors or fewer images, pacer::FileError where it cannot be
// read.
ImageSet read_images(const std::string& path, int64_t train);

// Draws `train` images, 2,000 where that is 0, and 500 for the test.
ImageSet draw_images(int64_t train);
