#include <pacer/device/detail/refusing_storage.h>

#include <c10/core/StorageImpl.h>

namespace pacer::detail {

c10::Storage refusing_storage(size_t bytes, c10::Device device, const std::string& sentence) {
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                             c10::DataPtr(nullptr, device),
                                                             /*allocator=*/nullptr, /*resizable=*/false));
  storage.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(sentence);
  return storage;
}

}  // namespace pacer::detail
