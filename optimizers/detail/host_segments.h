// State tensors of paged entries: views of segments of host memory, which pages are copied from and to. A
// segment has the fields of one dtype set one after the other, and in each the entries in the same order.
#pragma once

#include <cstdint>
#include <memory>
#include <tuple>
#include <vector>

#include <pacer/optimizers/detail/page_device.h>
#include <pacer/optimizers/detail/parameter_entry.h>
#include <pacer/optimizers/detail/state_memory.h>

namespace pacer::detail {

// A field of a segment.
struct HostField {
  const StateField* field;
  at::Tensor memory;  // a vector on the CPU
  int64_t element_bytes() const { return static_cast<int64_t>(memory.element_size()); }
};

class HostSegments final : public StateMemory {
 public:
  explicit HostSegments(PageDevice& device) : device_(device) {}

  // Decides where the state of each entry will lie and writes that into the entry. What lies in a segment
  // already stays there; for all others there is a new one, for each dtype set, or one of that size whose
  // tensors nobody holds any more. prepare_state comes next. Throws DeviceError where there is no memory.
  void place(std::vector<ParameterEntry>& entries);

  // The fields of a segment, in their order.
  const std::vector<HostField>& fields(size_t segment) const { return segments_[segment].fields; }
  // Changes with every operation of LibTorch's that writes a state tensor.
  uint64_t versions() const;
  static int64_t bytes_per_element(const std::vector<HostField>& fields);

  bool may_stay(const ParameterEntry& entry, const at::Tensor& tensor) const override;
  std::vector<at::Tensor> make(const std::vector<ParameterEntry*>& entries, const StateField& field,
                               at::ScalarType dtype) override;

 private:
  struct Segment {
    kernels::AdamStorage storage;
    bool has_second_moment, amsgrad;
    int64_t state_bits;
    int64_t elements;
    std::vector<HostField> fields;
  };
  Segment make_segment(const ParameterEntry& like, int64_t elements);
  using Kind = std::tuple<kernels::AdamStorage, bool, bool, int64_t>;
  // What has segments of its own, because it has other fields.
  template <class Like>
  static Kind kind_of(const Like& like) {
    return {like.storage, like.has_second_moment, like.amsgrad, like.state_bits};
  }
  bool find_place(ParameterEntry& entry) const;

  PageDevice& device_;
  std::vector<Segment> segments_;
};

}  // namespace pacer::detail
