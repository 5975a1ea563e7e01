#include <pacer/optimizers/detail/host_segments.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>

#include <pacer/core/error.h>
#include <pacer/core/tile.h>
#include <pacer/optimizers/detail/page_plan.h>

namespace pacer::detail {
namespace {

// Whether the tensor is the field's, for an entry that lies from element `offset` on.
bool is_view_of(const HostField& field, int64_t offset, const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cpu() || tensor.scalar_type() != field.memory.scalar_type())
    return false;
  return tensor.storage().is_alias_of(field.memory.storage()) && tensor.storage_offset() == offset;
}

}  // namespace

int64_t HostSegments::bytes_per_element(const std::vector<HostField>& fields) {
  int64_t bytes = 0;
  for (const HostField& field : fields) bytes += field.element_bytes();
  return bytes;
}

uint64_t HostSegments::versions() const {
  uint64_t versions = 0;
  for (const Segment& segment : segments_) {
    for (const HostField& field : segment.fields) versions += static_cast<uint64_t>(field.memory._version());
  }
  return versions;
}

// A segment from memory of its own, whose tensors keep that memory alive.
HostSegments::Segment HostSegments::make_segment(const ParameterEntry& like, int64_t elements) {
  Segment segment{like.storage, like.has_second_moment, like.amsgrad, like.state_bits, elements, {}};
  std::vector<std::pair<const StateField*, at::ScalarType>> needed;
  int64_t bytes_each = 0;
  for (const StateField& field : kStateFields) {
    const auto dtype = is_elementwise(field.kind) ? dtype_of(like, field) : std::nullopt;
    if (!dtype) continue;
    needed.emplace_back(&field, *dtype);
    bytes_each += static_cast<int64_t>(c10::elementSize(*dtype));
  }
  const c10::InferenceMode counts_versions(false);
  const std::shared_ptr<void> memory = device_.host_memory(elements * bytes_each);
  auto* begin = static_cast<char*>(memory.get());
  for (const auto& [field, dtype] : needed) {
    const auto options = at::TensorOptions().dtype(dtype);
    segment.fields.push_back({field, at::from_blob(
                                         begin, {elements}, [memory](void*) {}, options)});
    begin += elements * static_cast<int64_t>(c10::elementSize(dtype));
  }
  return segment;
}

// All state tensors are views of one segment at one place, in the layout of the entry's memory.
bool HostSegments::find_place(ParameterEntry& entry) const {
  for (size_t s = 0; s < segments_.size(); ++s) {
    const Segment& segment = segments_[s];
    if (kind_of(segment) != kind_of(entry)) continue;
    const at::Tensor& first = (entry.state->*segment.fields.front().field->read)();
    if (!first.defined()) return false;
    const int64_t offset = first.storage_offset();
    const bool fits = std::all_of(segment.fields.begin(), segment.fields.end(), [&](const HostField& field) {
      const at::Tensor& tensor = (entry.state->*field.field->read)();
      return is_view_of(field, offset, tensor) && same_layout(tensor, entry.memory);
    });
    if (!fits || offset % kStateAlignment != 0) continue;
    entry.host_segment = s;
    entry.host_offset = offset;
    return true;
  }
  return false;
}

void HostSegments::place(std::vector<ParameterEntry>& entries) {
  std::set<std::pair<size_t, int64_t>> taken;  // two entries with the same state tensors get each their own
  std::map<Kind, std::vector<ParameterEntry*>> without_place;
  std::vector<char> is_used(segments_.size());
  for (ParameterEntry& entry : entries) {
    if (find_place(entry) &&
        (entry.range.count == 0 || taken.emplace(*entry.host_segment, entry.host_offset).second)) {
      is_used[*entry.host_segment] = true;
    } else {
      without_place[kind_of(entry)].push_back(&entry);
    }
  }
  // What no entry uses and nobody else holds can serve again; what somebody holds is only let go of.
  std::vector<Segment> kept, free;
  std::vector<size_t> new_number(segments_.size());
  for (size_t s = 0; s < segments_.size(); ++s) {
    Segment& segment = segments_[s];
    const auto is_held = [](const HostField& field) { return field.memory.storage().use_count() > 1; };
    if (is_used[s]) {
      new_number[s] = kept.size();
      kept.push_back(std::move(segment));
    } else if (std::none_of(segment.fields.begin(), segment.fields.end(), is_held)) {
      free.push_back(std::move(segment));
    }
  }
  for (ParameterEntry& entry : entries) {
    if (entry.host_segment) entry.host_segment = new_number[*entry.host_segment];
  }
  segments_ = std::move(kept);
  std::map<Kind, int64_t> elements_of;
  for (const auto& [key, members] : without_place) {
    int64_t& elements = elements_of[key];
    for (const ParameterEntry* entry : members) elements += round_up(entry->range.count, kStateAlignment);
    elements = std::max(elements, kStateAlignment);  // all may be empty
  }
  const auto fits = [&](const Segment& segment) {
    const auto wanted = elements_of.find(kind_of(segment));
    return wanted != elements_of.end() && wanted->second == segment.elements;
  };
  free.erase(std::remove_if(free.begin(), free.end(), [&](const Segment& segment) { return !fits(segment); }),
             free.end());
  for (const auto& [key, members] : without_place) {
    const auto same = std::find_if(free.begin(), free.end(), [&, &wanted = key](const Segment& segment) {
      return kind_of(segment) == wanted;
    });
    if (same != free.end()) {
      for (HostField& field : same->fields) field.memory.zero_();
      segments_.push_back(std::move(*same));
      free.erase(same);
    } else {
      segments_.push_back(make_segment(*members.front(), elements_of[key]));
    }
    int64_t offset = 0;
    for (ParameterEntry* entry : members) {
      entry->host_segment = segments_.size() - 1;
      entry->host_offset = offset;
      offset += round_up(entry->range.count, kStateAlignment);
    }
  }
}

bool HostSegments::may_stay(const ParameterEntry& entry, const at::Tensor& tensor) const {
  const auto& own = fields(*entry.host_segment);
  return std::any_of(own.begin(), own.end(),
                     [&](const HostField& field) { return is_view_of(field, entry.host_offset, tensor); });
}

std::vector<at::Tensor> HostSegments::make(const std::vector<ParameterEntry*>& entries,
                                           const StateField& field, at::ScalarType dtype) {
  std::vector<at::Tensor> made;
  for (const ParameterEntry* entry : entries) {
    for (const HostField& own : fields(*entry->host_segment)) {
      if (own.field != &field || own.memory.scalar_type() != dtype) continue;
      made.push_back(
          own.memory.as_strided(entry->memory.sizes(), entry->memory.strides(), entry->host_offset));
    }
  }
  require<Error>(made.size() == entries.size(), "a segment of host memory lacks ", field.name);
  return made;
}

}  // namespace pacer::detail
