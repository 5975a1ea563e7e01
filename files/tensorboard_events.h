// TensorBoard event files with scalars, written without protobuf: TFRecord frames (length, masked CRC-32C,
// payload, masked CRC-32C) around the few fields of tensorflow.Event that scalars and a start need. No
// histograms, no images, no reading.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace pacer {

// One new event file in a log folder; `tensorboard --logdir FOLDER` follows it while it grows. Not safe to
// use from several threads at once.
class TensorBoardFile {
 public:
  // Creates `folder` where it is missing and in it events.out.tfevents.<unix time>.<host>.<pid>.<number>;
  // never touches a file that exists. Throws FileError.
  explicit TensorBoardFile(const std::string& folder);

  // Writes what is still held back, as far as that is possible; call flush() to learn of failures.
  ~TensorBoardFile();
  TensorBoardFile(const TensorBoardFile&) = delete;
  TensorBoardFile& operator=(const TensorBoardFile&) = delete;

  // Adds one point, with the time of now, to the curve `tag` ("train/loss"). TensorBoard keeps fp32 values;
  // NaN and infinities are kept. Records are held back up to 64 KiB, then written like by flush(). Throws
  // InvalidArgument for a tag that is empty or not UTF-8, which TensorBoard cannot read.
  void add_scalar(std::string_view tag, int64_t step, float value);

  // Says that the points from this step on begin anew: TensorBoard forgets those of the same or later steps
  // that earlier files of the folder have, of a run that was killed after its last checkpoint.
  void add_start(int64_t step);

  // When this returns, everything added has reached the operating system. Throws FileError where it cannot
  // (a full disk); nothing is lost then, and a later flush goes on at the byte where this one stopped.
  void flush();

  const std::string& path() const { return path_; }

 private:
  std::string path_;
  std::string held_back_;
  int descriptor_ = -1;
};

}  // namespace pacer
