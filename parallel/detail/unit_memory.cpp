#include <pacer/parallel/detail/unit_memory.h>

#include <utility>

#include <pacer/core/error.h>
#include <pacer/device/detail/refusing_storage.h>

namespace pacer::detail {

void require_in_place(bool is_in_place, const std::string& name) {
  require(is_in_place, "parameter ", name,
          " was moved (to(), set_data) after ranks had shared it out; move the model before");
}

UnitMemory::UnitMemory(std::vector<at::Tensor> parameters, std::vector<std::string> names, at::Tensor flat)
    : parameters_(std::move(parameters)), names_(std::move(names)), flat_(std::move(flat)) {
  for (const std::string& name : names_) {
    refusing_.push_back(
        refusing_storage(flat_.nbytes(), flat_.device(),
                         "parameter " + name +
                             " is shared out: its values are here only while its block runs; read or change "
                             "it there, or while what Session::whole_parameters() returns exists"));
  }
  release();
}

void UnitMemory::attach(const at::Tensor& memory) {
  for (size_t i = 0; i < parameters_.size(); ++i) require_in_place(holds(i), names_[i]);
  at::Tensor kept = memory;
  void* data = kept.mutable_data_ptr();
  auto* owner = new at::Tensor(std::move(kept));
  storage().set_data_ptr_noswap(
      {data, owner, [](void* tensor) { delete static_cast<at::Tensor*>(tensor); }, flat_.device()});
  storage().set_nbytes(memory.nbytes());
  for (const at::Tensor& parameter : parameters_) {
    parameter.unsafeGetTensorImpl()->set_storage_keep_dtype(flat_.storage());
  }
}

void UnitMemory::release() {
  storage().set_data_ptr_noswap(at::DataPtr(nullptr, flat_.device()));
  storage().set_nbytes(0);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    // One that was moved stays where it is, for attach() to notice.
    if (holds(i)) parameters_[i].unsafeGetTensorImpl()->set_storage_keep_dtype(refusing_[i]);
  }
}

bool UnitMemory::holds(size_t parameter) const {
  const c10::StorageImpl* now = parameters_[parameter].storage().unsafeGetStorageImpl();
  return now == flat_.storage().unsafeGetStorageImpl() || now == refusing_[parameter].unsafeGetStorageImpl();
}

}  // namespace pacer::detail
