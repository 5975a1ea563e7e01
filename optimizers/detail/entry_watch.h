// What a step compares of an entry with what the plan was built from. is_current() compares all of it. Mostly
// nothing has changed but the address of the gradient, and gradient_of_unchanged() sees that in a few loads:
// for a step over thousands of small tensors that is all the host's time. They are in step_walk.cpp, which
// alone calls what is inline.
#pragma once

#include <cstdint>
#include <type_traits>

#include <ATen/core/Tensor.h>

#include <pacer/optimizers/detail/optimizer_traits.h>
#include <pacer/optimizers/detail/parameter_entry.h>

namespace pacer::detail {

class EntryWatch {
 public:
  // Watches an entry that has its place in a DtypeTable or in the CompressedParameters.
  explicit EntryWatch(const ParameterEntry& entry);

  // True while parameter and state tensors are where the plan has them, in the layout that it has.
  bool is_current(const ParameterEntry& entry) const;
  // Where that is so, and kernels can read the gradient as it is: its first element. Null says nothing: then
  // is_current(), check_gradient() and needs_dense_gradient() decide.
  inline const void* gradient_of_unchanged(const at::Tensor& gradient) const;

  // True while the state is the parameter's. If `states` has other memory than at the last finds(), that one
  // comes first.
  bool is_registered(const ParamStates& states) {
    const bool is_in_place = in_states_->has_value() && in_states_->value.first == tensor &&
                             in_states_->value.second.get() == state;
    return is_in_place || finds(states);
  }
  bool finds(const ParamStates& states);

  // Ask for memory that will be read soon: for all but the gradient; then for that; then for where its
  // elements are.
  inline void fetch() const;
  inline void fetch_gradient() const;
  inline void fetch_elements() const;

  c10::TensorImpl* tensor;  // the parameter
  FusedAdamStateFields* state;
  // Copies of ParameterEntry::table and ParameterEntry::position.
  size_t table, position;
  int64_t step_group = 0;
  bool gradient_is_dense = true;  // in this step, as it is

 private:
  // The address of a tensor's first element. TensorImpl::data() asks much more.
  struct Place {
    const c10::TensorImpl* tensor = nullptr;
    const char* data = nullptr;
    caffe2::TypeMeta dtype;
    uint16_t element_size = 0;
    bool has_layout = false;  // the parameter's, or that of the range: it must keep it

    bool is_left() const { return tensor->dtype() == dtype && data_of(*tensor, element_size) == data; }
  };
  static Place place_of(const at::Tensor& tensor, bool has_layout);
  static const char* data_of(const c10::TensorImpl& tensor, int64_t element_size) {
    const c10::StorageImpl* storage = tensor.unsafe_storage().unsafeGetStorageImpl();
    if (storage == nullptr) return nullptr;
    return static_cast<const char*>(storage->data()) + tensor.storage_offset() * element_size;
  }
  inline bool has_same_tensors() const;
  // All of a parameter without gaps, and not empty: its tensors have one layout.
  bool is_plain_;
  at::Device device_;
  // An entry of LibTorch's hash table.
  const std::remove_pointer_t<decltype(ParamStates::iterator().current)>* in_states_ = nullptr;
  // They are held, so that no others can take their addresses.
  at::Tensor state_tensors_[kStateFieldCount];
  int32_t places_ = 1;  // the parameter's, then those of the state tensors that there are
  Place place_[1 + kStateFieldCount];
  int64_t elements_;
};

}  // namespace pacer::detail
