// What a 1-bit optimizer is to do beside its rule: when to freeze, how to compress, and what: the tensors of
// its flat buffers.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/compression/detail/onebit_route.h>
#include <pacer/kernels/math/adam_storage.h>
#include <pacer/optimizers/detail/optimizer_view.h>

namespace pacer::detail {

struct ParameterEntry;

// The kinds of steps.
enum class OneBitKind {
  warm_up,
  compressed,  // the momentum travels as signs
  dense,       // gradients are the mean over ranks already
  refresh,     // the same, and the variance takes them in, too
};

struct OneBitSettings : OneBitGroupSettings {
  std::vector<bool> compressed;  // by group
  double beta2 = 0.999;          // of the first compressed group, as the next
  bool bias_correction = true;

  // What must stay as it was from the first step on. Before the freeze groups may come to the end.
  bool exchanges_like(const OneBitSettings& earlier) const;
};

// Checked; throws InvalidArgument that names the optimizer where groups differ or options contradict each
// other.
OneBitSettings onebit_settings(const char* optimizer, const std::vector<GroupSettings>& settings);

// A compressed parameter, or this rank's part of it as a vector, as it was when the variance froze.
struct OneBitTensor {
  std::string name;
  size_t group = 0;
  std::vector<int64_t> sizes, strides;
  int64_t count = 0;
  kernels::AdamStorage storage = kernels::AdamStorage::f32;
  std::vector<int64_t> bounds = {};  // ParameterRange::bounds; empty where it is not a part

  // The elements from `offset` on in a flat buffer, in the parameter's shape and memory order.
  at::Tensor view(const at::Tensor& flat, int64_t offset) const {
    return flat.as_strided(sizes, strides, offset);
  }
};

// One for each tensor.
using OneBitStates = std::vector<FusedAdamStateFields*>;

// Returns how many elements the whole parameter has, on all ranks that have parts of it.
inline int64_t whole_count(const OneBitTensor& tensor) {
  return tensor.bounds.empty() ? tensor.count : tensor.bounds.back();
}
// The numbers of the tensors with which buckets begin: 0, and the next one where a bucket has so many bytes,
// 4 an element, of whole parameters, so that all ranks cut alike. Unset: one bucket.
std::vector<int64_t> first_of_buckets(const std::vector<OneBitTensor>& tensors,
                                      const std::optional<int64_t>& bytes);

// The tensors of each bucket.
std::vector<std::vector<OneBitTensor>> cut(const std::vector<OneBitTensor>& tensors,
                                           const std::vector<int64_t>& first_of_buckets);

// What the ranks of a 1-bit optimizer exchange, and with whom.
struct OneBitSetup : OneBitSettings {
  kernels::UpdateRule rule;
  OneBitRoute route;

  bool exchanges() const { return one_bit() && (route.workers() > 1 || compress_alone()); }
  // The numbers of the tensors with which buckets begin; there is one bucket where nothing is exchanged.
  std::vector<int64_t> first_of_buckets(const std::vector<OneBitTensor>& tensors) const {
    return detail::first_of_buckets(tensors, exchanges() ? bucket_bytes() : std::nullopt);
  }
};

std::vector<int64_t> counts_of(const std::vector<OneBitTensor>& tensors);
// Returns the bounds of each tensor; every tensor must be a part.
std::vector<std::vector<int64_t>> bounds_of(const std::vector<OneBitTensor>& tensors);

// The parameters of compressed groups, in the order of their registration: what this rank updates of them,
// or whole.
std::vector<OneBitTensor> onebit_tensors(const OptimizerView& optimizer,
                                         const std::vector<GroupSettings>& settings, bool whole = false);
// Throws InvalidArgument, in one sentence, where the entries are no longer these tensors: others, or of another
// dtype, shape or memory order. `since` says from when on they had to be, `elsewhere` where a new one may go.
void check_same(const std::vector<const ParameterEntry*>& entries,
                const std::vector<const OneBitTensor*>& tensors, const char* since, const char* elsewhere);
// Their states among `states`; throws InvalidArgument where one has none.
OneBitStates onebit_states(const OptimizerView& optimizer, const std::vector<GroupSettings>& settings,
                           const ParamStates& states);
// States of step 0 get the largest count of their group, or where that is 0, of all: else their first step
// would be divided by the bias correction of step 1, and be ten times as large as anybody else's.
void give_unstepped_counts(const std::vector<OneBitTensor>& tensors, const OneBitStates& states);

}  // namespace pacer::detail
