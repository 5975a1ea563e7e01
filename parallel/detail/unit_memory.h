// Memory of parameters that comes and goes: several parameters share one storage, which holds their values
// for a while and nothing in between. The parameters stay the tensors that they are (the optimizer's keys,
// the graph's leaves), versions do not move, and views that autograd saved see the values again once they are
// back. A released parameter that is touched answers with a sentence that names it.
#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

namespace pacer::detail {

// Throws InvalidArgument where a parameter is not where sharing it out has put it.
void require_in_place(bool is_in_place, const std::string& name);

class UnitMemory {
 public:
  // Parameters whose values are views of `flat`, a vector that is theirs alone. They are released.
  UnitMemory(std::vector<at::Tensor> parameters, std::vector<std::string> names, at::Tensor flat);

  // From now on the parameters' values are those of `memory`, a vector like `flat`, which is not copied and
  // is held until release(). Throws InvalidArgument where somebody has given one of them other memory.
  void attach(const at::Tensor& memory);
  // Afterwards views of the parameters that were taken in between must not be read: they have no memory.
  void release();
  // False where somebody has given the parameter other memory.
  bool holds(size_t parameter) const;

 private:
  c10::StorageImpl& storage() const { return *flat_.storage().unsafeGetStorageImpl(); }

  std::vector<at::Tensor> parameters_;
  std::vector<std::string> names_;
  std::vector<c10::Storage> refusing_;  // of the parameters while there is no memory
  at::Tensor flat_;                     // of their common storage
};

}  // namespace pacer::detail
