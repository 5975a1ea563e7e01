// The errors of a 1-bit exchange over another number of ranks: what they were worth together.
#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/kernels/onebit_layout.h>
#include <pacer/optimizers/detail/onebit_settings.h>
#include <pacer/optimizers/named_tensors.h>

namespace pacer::detail {

// fp64, in the parameter's shape.
struct JoinedErrors {
  at::Tensor worker;  // the mean over ranks, added in their order
  at::Tensor server;  // of all chunks
};

// Joins the errors of one parameter, which CompressedParameters::export_errors left on each rank; they are
// zeros where ranks left nothing. Throws InvalidArgument that names what is missing or does not fit.
JoinedErrors join_errors(const std::vector<NamedTensors>& rank_states, const OneBitTensor& of);

// Adds them as a rank's own, which serves that part of the parameter's memory.
void add_errors(const JoinedErrors& errors, const OneBitTensor& of, kernels::OneBitLayout::Part served,
                NamedTensors& state);

// Puts together what ranks left that each had a part of their node's errors, `ranks_per_worker` to a node: a
// state for each node, as if it had had all of them. `whole`: the parameters.
std::vector<NamedTensors> whole_errors(const std::vector<NamedTensors>& rank_states, int64_t ranks_per_worker,
                                       const std::vector<OneBitTensor>& whole);

// Server errors are lists in the order of the parameter's memory. Where that is not row-major, its strides
// are saved beside them, from version 2 of the state on; version 1 did not say, and is read as if nothing had
// changed.
inline constexpr char kStrides[] = "/strides";
inline constexpr char kErrorsVersion[] = "onebit/state_version";
void add_strides(const std::string& name, at::IntArrayRef sizes, at::IntArrayRef strides,
                 NamedTensors& state);
// `now`: of the parameter as it is here.
std::vector<int64_t> saved_strides(const NamedTensors& state, const std::string& name, at::IntArrayRef sizes,
                                   at::IntArrayRef now, int64_t version);
// Equal where they matter: along dimensions of more than one element.
bool same_strides(at::IntArrayRef a, at::IntArrayRef b, at::IntArrayRef sizes);
// Takes out what a state of that version says of the memory order of the parameter's errors. Throws InvalidArgument
// where that is not the parameter's own.
void require_same_order(NamedTensors& errors, const OneBitTensor& of, int64_t version);
// Returns the version that a rank's state names, or 1 if it names none.
int64_t errors_version(const NamedTensors& state);

// The elements as a vector, in the order in which they lie in the parameter's memory, which has no gaps.
at::Tensor in_memory_order(const at::Tensor& values, const OneBitTensor& of);

}  // namespace pacer::detail
