#include "images.h"

#include <cstring>

#include <ATen/ATen.h>

#include <pacer/core/error.h>
#include <pacer/files/file_system.h>
#include <pacer/files/safetensors.h>

#include "support/drawn_shapes.h"

namespace {

// A copy of a tensor of bytes; `dimensions` is how many it must have.
at::Tensor bytes_named(const pacer::SafetensorsFile& file, const std::string& path, const std::string& name,
                       size_t dimensions) {
  const auto found = file.find(name);
  pacer::require(found.has_value(), path, " has no tensor ", name, "; digits.py writes such a file");
  pacer::require(found->dtype == pacer::Dtype::U8 && found->shape.size() == dimensions, path, ": ", name,
                 " must be of uint8 with ", dimensions, " dimensions");
  auto tensor = at::empty(found->shape, at::kByte);
  if (found->bytes > 0) std::memcpy(tensor.data_ptr(), found->data, found->bytes);
  return tensor;
}

Images read(const pacer::SafetensorsFile& file, const std::string& path, const std::string& set) {
  const auto pixels = bytes_named(file, path, set + ".images", 3);
  const auto labels = bytes_named(file, path, set + ".labels", 1);
  pacer::require(pixels.size(0) == labels.size(0) && labels.size(0) > 0, path, ": there are ", pixels.size(0),
                 " ", set, ".images and ", labels.size(0), " ", set, ".labels; each image needs a label");
  pacer::require(pixels.size(1) == pixels.size(2), path, ": ", set, ".images must be square, not ",
                 pixels.size(1), " x ", pixels.size(2), " pixels");
  return {pixels.to(at::kFloat), labels.to(at::kLong)};
}

void normalize(ImageSet& set) {
  const double mean = set.train.pixels.mean().item<double>();
  const double deviation = set.train.pixels.std().item<double>();
  for (Images* images : {&set.train, &set.test}) {
    images->pixels = (images->pixels - mean) / (deviation > 0 ? deviation : 1.0);
  }
}

}  // namespace

ImageSet read_images(const std::string& path, int64_t train) {
  pacer::FileReader reader(pacer::posix_file_system(), path);
  const auto file = pacer::SafetensorsFile::parse(reader.read(), path);
  ImageSet set{read(file, path, "train"), read(file, path, "test"), 0, 0};
  set.side = set.train.pixels.size(1);
  pacer::require(set.test.pixels.size(1) == set.side, path, ": images of the training set have ", set.side,
                 " pixels a side, those of the test set ", set.test.pixels.size(1));
  set.classes = set.train.labels.max().item<int64_t>() + 1;
  pacer::require(set.test.labels.max().item<int64_t>() < set.classes, path,
                 ": the test set has a class that the training set does not have");
  pacer::require(train <= set.train.count(), "--train ", train, ": ", path, " has ", set.train.count(),
                 " training images");
  if (train > 0) {
    set.train = {set.train.pixels.narrow(0, 0, train), set.train.labels.narrow(0, 0, train)};
  }
  normalize(set);
  return set;
}

ImageSet draw_images(int64_t train) {
  constexpr int64_t kTrain = 2'000, kTest = 500;
  const auto draw = [](int64_t count) {
    const auto shapes = examples::draw_shapes(count);
    return Images{shapes.pixels, shapes.kinds};
  };
  Images drawn = draw(train > 0 ? train : kTrain);
  ImageSet set{std::move(drawn), draw(kTest), examples::kShapeSide, examples::kShapeKinds};
  normalize(set);
  return set;
}
