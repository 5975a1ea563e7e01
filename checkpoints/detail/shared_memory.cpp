#include <pacer/checkpoints/detail/shared_memory.h>

#include <algorithm>
#include <cstring>
#include <tuple>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

// Where a tensor lies in its storage, in bytes. Nothing here looks at elements: there may be none.
struct Place {
  const c10::StorageImpl* storage;
  int64_t begin, end;
  const NamedTensors::value_type* item;

  bool operator<(const Place& other) const {
    return std::tie(storage, begin) < std::tie(other.storage, other.begin);
  }
};

std::vector<Place> places_of(const NamedTensors& tensors, const NamedTensors& values) {
  std::vector<Place> places;
  for (const auto& item : tensors) {
    const at::Tensor& tensor = item.second;
    if (values.count(item.first) == 0 || !tensor.defined() || tensor.layout() != at::kStrided ||
        tensor.numel() == 0 || !tensor.has_storage()) {
      continue;
    }
    int64_t last = 0;
    for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
    const auto size = static_cast<int64_t>(tensor.element_size());
    const int64_t begin = tensor.storage_offset() * size;
    places.push_back({tensor.storage().unsafeGetStorageImpl(), begin, begin + (last + 1) * size, &item});
  }
  std::sort(places.begin(), places.end());
  return places;
}

// Whether the first still has its value, to the bit, after the second was copied.
bool fit_both(const Place& a, const Place& b, const NamedTensors& values) {
  constexpr int64_t kAlignment = 16;  // so that views of any dtype begin at a multiple of their element
  const int64_t begin = std::min(a.begin, b.begin) / kAlignment * kAlignment;
  const at::Tensor bytes = at::zeros({std::max(a.end, b.end) - begin}, at::kByte);
  const auto copied = [&](const Place& place) {
    const at::Tensor& own = place.item->second;
    at::Tensor view = at::empty({0}, own.options().device(at::kCPU).requires_grad(false));
    view.set_(bytes.storage(), (place.begin - begin) / static_cast<int64_t>(own.element_size()), own.sizes(),
              own.strides());
    view.copy_(values.at(place.item->first));
    return view;
  };
  const at::Tensor first = copied(a), before = first.contiguous().clone();
  copied(b);
  const at::Tensor after = first.contiguous();
  return std::memcmp(before.const_data_ptr(), after.const_data_ptr(), before.nbytes()) == 0;
}

bool overlaps_itself(const at::Tensor& tensor) {
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1 && tensor.stride(d) == 0) return true;
  }
  return false;
}

}  // namespace

std::string conflict_in_memory(const NamedTensors& own, const NamedTensors& values) {
  const at::NoGradGuard no_grad;
  const std::vector<Place> places = places_of(own, values);
  for (size_t i = 0; i < places.size(); ++i) {
    const Place& a = places[i];
    for (size_t j = i + 1; j < places.size(); ++j) {
      const Place& b = places[j];
      if (b.storage != a.storage || b.begin >= a.end) break;
      if (a.item->second.is_same(b.item->second)) continue;
      if (overlaps_itself(a.item->second) || overlaps_itself(b.item->second)) continue;
      if (fit_both(a, b, values)) continue;
      return concatenate("\"", a.item->first, "\" and \"", b.item->first,
                         "\" share memory in this model, but differ");
    }
  }
  return "";
}

}  // namespace pacer::detail
