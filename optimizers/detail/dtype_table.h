// All parameters of one dtype set as the kernels take them: pointers, gradients and tiles, on the CPU or sent
// to the GPU. The table depends on the set of parameters only; which of them take part in a step, and with
// which scalars, is in the small gradient array.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/device/detail/device_buffer.h>
#include <pacer/kernels/adam.h>
#include <pacer/kernels/muon_8bit.h>
#include <pacer/kernels/norm.h>
#include <pacer/optimizers/detail/lamb_kernels.h>
#include <pacer/optimizers/detail/muon_kernels.h>
#include <pacer/optimizers/detail/parameter_entry.h>
#include <pacer/optimizers/detail/tile_loop.h>

namespace pacer::detail {

class DtypeTable {
 public:
  // `has_codes`: moments are in 8 bits. `muon`: how its matrices are orthogonalised; none for other rules. `directions`
  // and `share` as MuonKernels has them.
  DtypeTable(kernels::AdamLaunch launch, kernels::UpdateRule rule, bool has_codes,
             const std::optional<MuonSettings>& muon, const DirectionExchange* directions,
             ProductShare* share, at::Device device)
      : launch_(launch), rule_(rule), has_codes_(has_codes), device_(device) {
    if (!muon) return;
    launch_.loops = muon->is_cautious ? &kernels::kCautiousMuonUpdate : &kernels::kMuonUpdate;
    muon_.emplace(launch.storage, has_codes ? kernels::kMuon8BitLoops : kernels::kMuonLoops, *muon,
                  directions, share, device);
  }

  // Adds a prepared entry and writes down where it sits. All entries are added before the first step.
  void add(ParameterEntry& entry, size_t table);
  // Where the state is paged, the tiles and kernels of the update are a PagedTable's.
  void build_tiles(bool is_paged = false);
  // After it, where the entries are parts of tensors: bounds as in LambKernels::share_with.
  void share_with(const std::shared_ptr<Communicator>& ranks,
                  const std::vector<std::vector<int64_t>>& bounds) {
    if (lamb_) lamb_->share_with(ranks, bounds);
  }

  const kernels::AdamLaunch& launch() const { return launch_; }
  kernels::UpdateRule rule() const { return rule_; }
  bool has_codes() const { return has_codes_; }
  const kernels::AdamTensor& tensor(size_t position) const { return tensors_.host()[position]; }
  const std::vector<kernels::AdamGradient>& gradients() const { return gradients_.host(); }

  // Null leaves the parameter out of the step.
  void set_gradient(size_t position, int64_t step_group, const void* gradient) {
    gradients_.set(position, {gradient, step_group});
  }

  size_t tensors() const { return counts_.size(); }
  int64_t count(size_t position) const { return counts_[position]; }  // of the tensor's elements
  // Steps change these rows alone, by tensor; all rows of all tensors where the list is empty. Returns whether the next step
  // needs another kernel than the one before. Not where the state is paged, and for the rules that VisibleRows lets through.
  bool set_rows(const std::vector<kernels::RowMask>& rows) {
    if (!rows.empty()) rows_.host().resize(counts_.size());
    for (size_t i = 0; i < rows.size(); ++i) rows_.set(i, rows[i]);
    const bool had_rows = std::exchange(has_rows_, !rows.empty());
    return had_rows != has_rows_;
  }

  // Number of partial sums of the norm, and their computation into partials[0 ... norm_units()).
  int64_t norm_units() const { return static_cast<int64_t>(units_.host().size()); }
  void sum_of_squares(double* partials) { sum_of_squares(partials, 0, counts_.size()); }
  // Only those of the tensors from `first` on, so many; partials is that of all. The others stay.
  void sum_of_squares(double* partials, size_t first, size_t tensors);
  // Sends the addresses of gradients, where they changed.
  void send_gradients() { gradients_.send(device_); }

  // Sends what step(), and sum_of_squares() if `with_units`, need to the GPU, where it changed.
  void send(bool with_units);

  // Makes what the update of matrices reads, which changes nothing that lasts, but needs memory and throws where
  // there is none. The same scalars as in step().
  bool has_matrices() const { return muon_.has_value(); }
  void orthogonalize(const kernels::StepScalars* scalars);
  // Behind it, where ranks have made the mean of their directions: goes on with that.
  void take_mean(const kernels::StepScalars* scalars);

  // Updates every tensor whose gradient is set. `scalars` are host or device memory, as the device is.
  // `follows_prologue`: nothing was enqueued since StepGroups::write_scalars.
  void step(const kernels::StepScalars* scalars, bool follows_prologue);

  // Returns the trust ratio of the parameter's last step, or 1 if the rule has none. Waits for a GPU.
  double trust_ratio(size_t position) const;

 private:
  kernels::AdamLaunch launch_;
  kernels::UpdateRule rule_;
  bool has_codes_;
  at::Device device_;
  bool is_paged_ = false;
  std::vector<int64_t> counts_;
  std::vector<kernels::LambAverage*> averages_;
  std::vector<int64_t> first_units_;  // by tensor, and their number
  int64_t longest_unit_ = 0;          // in elements
  DeviceBuffer<kernels::AdamTensor> tensors_;
  DeviceBuffer<kernels::AdamGradient> gradients_;
  DeviceBuffer<kernels::RowMask> rows_;  // empty, or by tensor
  bool has_rows_ = false;
  TilesBySize tiles_;
  DeviceBuffer<Tile> units_;
  std::optional<LambKernels> lamb_;
  std::optional<MuonKernels> muon_;
};

}  // namespace pacer::detail
