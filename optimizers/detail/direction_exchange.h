// What the ranks of a OneBitMuon send each other in a step: a direction of each matrix, which every rank makes from
// its own momentum. They lie one behind the other in one buffer, which becomes their mean over ranks and travels as
// signs (CompressedAllReduce). It belongs to the StepEngine, whose tables write directions and read the mean.
//
// Ranks agree on the places of matrices in the buffer. So the list of matrices, their shapes and memory order are
// fixed from the first step on.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/compression/compressed_all_reduce.h>
#include <pacer/kernels/onebit_layout.h>
#include <pacer/optimizers/detail/named_views.h>
#include <pacer/optimizers/detail/onebit_settings.h>
#include <pacer/optimizers/detail/parameter_entry.h>
#include <pacer/optimizers/gradient_guard.h>

namespace pacer::detail {

class DirectionExchange {
 public:
  // In the order of the parameters.
  DirectionExchange(std::vector<OneBitTensor> matrices, std::shared_ptr<Communicator> world,
                    const CompressionOptions& options);

  const std::vector<OneBitTensor>& matrices() const { return matrices_; }
  const OneBitRoute& route() const { return route_; }
  const CompressionOptions& options() const { return options_; }
  // Throws InvalidArgument, in one sentence, where these are no longer the matrices.
  void check_fits(const std::vector<const ParameterEntry*>& entries) const;

  // ---- One step, in this order. ----

  // `local_weight`: what stored gradients of this rank must be multiplied with besides the average. The first
  // time ranks compare what they exchange, and come here together. Throws Error where a former step failed.
  void begin(double local_weight);
  double local_weight() const { return local_weight_; }
  // The guard looks at all gradients; `own` are partial sums of squares of those of matrices, `averaged` of all
  // others, on the device.
  void look(GradientGuard& guard, const double* own, int64_t own_count, const double* averaged,
            int64_t count);
  // Memory of a direction: fp32, in the shape and memory order of the matrix. What this rank writes there
  // becomes the mean in average().
  at::Tensor direction(size_t matrix) const;
  // From here on a step cannot be undone. On CUDA nothing changes where the gradients are not finite.
  void average(const kernels::GradientCheck* check);
  // The step has ended.
  void conclude() { is_under_way_ = false; }
  // Whether average() was called and conclude() was not.
  bool is_under_way() const { return is_under_way_; }

  // ---- State of this rank: what rounding to signs has lost, by matrix. ----

  // Whether there are any, since the first mean or a load.
  bool has_errors() const { return has_errors_; }
  void export_errors(NamedTensors& state) const;
  // Takes its tensors out of a state of that version. Throws InvalidArgument that names what is missing or does
  // not fit.
  void load_errors(NamedTensors& state, int64_t version);
  // The elements of the matrix that this rank, or its node, serves, in the matrix's own numbering.
  kernels::OneBitLayout::Part served_part(size_t matrix) const;

  int64_t bytes_sent() const { return mean_.bytes_sent(); }
  void rename(const std::vector<std::string>& names);

 private:
  // Errors by name: views of `worker`, as long as the buffer, and of `server`, as long as the served range.
  NamedViews views(const at::Tensor& worker, const at::Tensor& server) const;

  std::vector<OneBitTensor> matrices_;
  std::vector<int64_t> offsets_;  // in the buffer
  OneBitRoute route_;
  CompressionOptions options_;
  CompressedAllReduce mean_;
  at::Tensor buffer_;
  at::Tensor sums_;  // fp64 (3), for look_jointly
  double local_weight_ = 1;
  bool has_agreed_ = false;
  bool has_errors_ = false;
  bool is_under_way_ = false;
};

// Whether ranks send the same with both.
bool send_alike(const CompressionOptions& a, const CompressionOptions& b);

// The matrices of all groups that Muon's rule updates, in the order of the parameters.
std::vector<OneBitTensor> exchanged_matrices(const OptimizerView& optimizer,
                                             const std::vector<GroupSettings>& settings);

}  // namespace pacer::detail
