// Gradients that are nobody's to read or write for a while, because they are being added up over ranks. A
// reader would see half a sum, and what is written would be lost, or count on some ranks only. So a stand-in
// without memory takes the place of parameter.grad() meanwhile: whoever touches it gets a sentence that names
// the parameter, at that line. What that line has done before stays so: LibTorch's AdamW, for one, has
// decayed its first parameter before it reads the gradient.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace pacer::detail {

class WithheldGradients {
 public:
  // `remedy` ends the sentences: what to do instead.
  explicit WithheldGradients(std::string remedy) : remedy_(std::move(remedy)) {}
  WithheldGradients(const WithheldGradients&) = delete;
  // Puts back what is still withheld.
  ~WithheldGradients() { put_back(); }

  // Parameters are numbered in the order in which they are added.
  void add(const std::string& name, const at::Tensor& parameter);
  // Keeps this parameter's gradient, if it has one, until it is put back or returned.
  void withhold(size_t parameter);
  // All gradients that there are.
  void withhold_all();
  // Puts all gradients back. Throws InvalidArgument that names the first parameter whose stand-in was cleared
  // or replaced; that one stays as it is.
  void give_back();
  // The same without an error.
  void put_back();

 private:
  struct Entry {
    std::string name;
    at::Tensor parameter;
    at::Tensor stand_in;  // undefined before the first time
    at::Tensor gradient;
    bool is_withheld = false;
  };
  // Returns false where somebody has cleared or replaced the stand-in.
  static bool put_back(Entry& entry);

  const std::string remedy_;
  std::vector<Entry> entries_;
};

}  // namespace pacer::detail
