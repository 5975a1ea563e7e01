// model.safetensors.index.json of a folder as Hugging Face has it: which tensor is in which file.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace pacer::detail {

class WeightsIndex {
 public:
  // Names nothing.
  WeightsIndex() = default;
  // The index in a file of at most 100 MB.
  static WeightsIndex read(const std::string& path);
  // Safe for any bytes, and allocates no more than `text` has, which is less than 4 GiB; `path` is for
  // messages. FileError with the byte and the tensor for what is no index, a tensor that occurs twice, and a
  // file that is not in the folder itself.
  static WeightsIndex parse(std::vector<char> text, const std::string& path);

  bool empty() const { return entries_.empty(); }
  // The file that a tensor is in; nothing where the index does not name the tensor.
  std::optional<std::string_view> file_of(std::string_view tensor) const;
  // The names of the files, sorted, each of them once; the views point into this object.
  std::vector<std::string_view> files() const;
  // Calls visit(tensor, file) for all tensors, sorted by name.
  template <class Visit>
  void for_each(const Visit& visit) const {
    for (const Entry& entry : entries_) visit(view(entry.tensor), view(entry.file));
  }

 private:
  // Where the two names begin in text_; a NUL ends each. 8 bytes, as many as the shortest entry of a text
  // has: an index of millions of tensors is no way to fill the memory.
  struct Entry {
    uint32_t tensor, file;
  };
  class Parser;
  std::string_view view(uint32_t at) const { return text_.data() + at; }

  std::vector<char> text_;
  std::vector<Entry> entries_;  // by the name of the tensor
};

}  // namespace pacer::detail
