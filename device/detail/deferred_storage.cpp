#include <pacer/device/detail/deferred_storage.h>

#include <cstdlib>
#include <utility>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <c10/core/TensorImpl.h>

#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

DeferredStorage* deferred_storage_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  return dynamic_cast<DeferredStorage*>(tensor.storage().unsafeGetStorageImpl());
}

}  // namespace

DeferredStorage::DeferredStorage(size_t bytes, c10::Device device, const std::string& sentence)
    : c10::StorageImpl(use_byte_size_t(), bytes, c10::DataPtr(nullptr, device), /*allocator=*/nullptr,
                       /*resizable=*/false) {
  release_data_and_set_meta_custom_data_ptr_error_msg_(sentence);
}

void defer(at::Tensor& parameter, const c10::TensorOptions& kind, const std::string& sentence) {
  const size_t bytes = static_cast<size_t>(parameter.numel()) * kind.dtype().itemsize();
  c10::Storage storage(c10::make_intrusive<DeferredStorage>(bytes, kind.device(), sentence));
  const at::Tensor empty = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(kind.computeDispatchKey()), kind.dtype());
  empty.unsafeGetTensorImpl()->set_sizes_contiguous(parameter.sizes());
  parameter.set_data(empty);
}

void return_freed_memory() {
#ifdef __GLIBC__
  ::malloc_trim(0);
#endif
}

bool is_deferred(const at::Tensor& tensor) { return deferred_storage_of(tensor) != nullptr; }

at::Tensor& deferred_value(const at::Tensor& tensor) {
  DeferredStorage* storage = deferred_storage_of(tensor);
  require(storage != nullptr, "a tensor that has its values was asked for those that it shall have");
  return storage->value;
}

}  // namespace pacer::detail
