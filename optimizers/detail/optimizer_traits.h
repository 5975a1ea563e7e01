// What tells the optimizers from each other: names, option and state types, and what their options mean to
// the kernels. Everything else is shared, so the engine asks this small interface instead of being a
// template.
#pragma once

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include <torch/arg.h>
#include <torch/optim/optimizer.h>

#include <pacer/kernels/adam.h>
#include <pacer/kernels/math/onebit_lamb.h>
#include <pacer/optimizers/adam_param_state.h>
#include <pacer/optimizers/detail/option_numbers.h>
#include <pacer/optimizers/muon_options.h>
#include <pacer/optimizers/named_tensors.h>
#include <pacer/optimizers/onebit_options.h>
#include <pacer/optimizers/optimizer_options.h>
#include <pacer/optimizers/paging.h>

namespace pacer::detail {

// What a 1-bit optimizer asks for beside its rule, the same in all groups but for `compress`, which is false for
// groups of other optimizers.
struct OneBitGroupSettings : OneBitOptionsOf<OneBitGroupSettings> {
  OneBitGroupSettings() { compress(false); }

  TORCH_ARG(int64_t, refresh_variance_every) = 0;  // OneBitAdam only
};

// How Muon orthogonalises the matrices of a group.
struct MuonSettings {
  bool nesterov;
  MuonAdjustment adjustment;
  MuonCoefficients coefficients;
  MuonPrecision precision;
  int64_t iterations, split;
  bool normalizes_rows;  // states have a row_moment
  double row_beta;
  bool is_cautious;

  auto all() const {
    return std::tie(nesterov, adjustment, coefficients, precision, iterations, split, normalizes_rows,
                    row_beta, is_cautious);
  }
  bool operator==(const MuonSettings& other) const { return all() == other.all(); }
  bool operator<(const MuonSettings& other) const { return all() < other.all(); }
};

// Validated options of one parameter group.
struct GroupSettings {
  kernels::RuleSettings kernel;
  bool amsgrad = false;
  bool has_first_moment = true;   // states have exp_avg
  bool has_second_moment = true;  // states have exp_avg_sq
  // The first gradient is the first moment as it is, in the first step with one: a state that gets its first moment later
  // counts its steps from there.
  bool starts_at_gradient = false;
  bool maximizes = false;                       // gradients are negated
  const kernels::UpdateLoops* loops = nullptr;  // null: Adam's, with moments in 32 bits, or LAMB's
  std::optional<MuonSettings> muon;             // Muon only: the group's rule is not AdamW
  bool finite_check = false;
  bool averages_trust = false;  // states have a trust_average
  MasterWeights master_weights = MasterWeights::automatic;
  Rounding rounding = Rounding::nearest;
  int64_t state_bits = 32;                  // of moments
  std::optional<Paging> paging;             // as the optimizer's own options have it, or unset
  kernels::LambFactorBounds factor_bounds;  // OneBitLamb only
  OneBitGroupSettings onebit;               // OneBitAdam and OneBitLamb only
  CompressionOptions compression;           // OneBitMuon only

  // Whether the parameter's momentum travels as signs once the variance froze.
  bool compresses(const at::Tensor& parameter) const {
    return onebit.compress() && (onebit.compress_vectors() || parameter.dim() >= 2);
  }
};

class OptimizerTraits {
 public:
  const char* const name;
  const char* const torch_name;  // of torch's optimizer of the same rule; null where there is none
  const bool is_onebit;          // OneBitAdam, OneBitLamb
  const bool has_matrices;       // Muon, OneBitMuon: groups are of one rule or the other
  const bool averages;           // ScheduleFreeAdamW: states count what their average has taken in

  // True for options of this optimizer's own type, as all below are unless they say otherwise.
  virtual bool owns(const torch::optim::OptimizerOptions& options) const = 0;
  // A copy of the options as this optimizer's own type. Where they are the torch optimizer's, what these lack
  // is as in `own`. Null if they are neither.
  virtual std::unique_ptr<torch::optim::OptimizerOptions> adopt(
      const torch::optim::OptimizerOptions& options, const torch::optim::OptimizerOptions& own) const = 0;
  // Options of a group, of this optimizer's own type: takes from the defaults what group_defaults.h says.
  virtual void inherit(torch::optim::OptimizerOptions& options,
                       const torch::optim::OptimizerOptions& defaults) const = 0;
  // Checked: throws InvalidArgument naming option, value and range.
  virtual GroupSettings settings(const torch::optim::OptimizerOptions& options) const = 0;
  virtual std::unique_ptr<torch::optim::OptimizerParamState> make_state() const = 0;
  // Options as named numbers, each name behind `prefix`, and back, from a state of that version
  // (0: one of torch's optimizer); reading
  // throws InvalidArgument naming what is missing, and adds the names it read to `used`. What is no part of a
  // state is as in `own`.
  virtual void export_options(const torch::optim::OptimizerOptions& options, const std::string& prefix,
                              NamedTensors& state) const = 0;
  virtual std::unique_ptr<torch::optim::OptimizerOptions> import_options(
      const std::string& prefix, const NamedTensors& state, int64_t version,
      const torch::optim::OptimizerOptions& own, std::set<std::string>& used) const = 0;
  // What ranks compare of them.
  virtual void visit_numbers(const torch::optim::OptimizerOptions& options, NumberVisitor& visit) const = 0;
  // The rate a schedule multiplies.
  virtual double base_lr(torch::optim::OptimizerOptions& options) const = 0;
  virtual void set_base_lr(torch::optim::OptimizerOptions& options, double rate) const = 0;

 protected:
  OptimizerTraits(const char* own_name, const char* of_torch, bool onebit, bool matrices, bool with_average)
      : name(own_name),
        torch_name(of_torch),
        is_onebit(onebit),
        has_matrices(matrices),
        averages(with_average) {}
  ~OptimizerTraits() = default;
};

// The traits of the optimizer whose own options these are; null where they are those of no optimizer of
// pacer.
const OptimizerTraits* find_traits(const torch::optim::OptimizerOptions& options);
// The same; throws InvalidArgument where there is none.
const OptimizerTraits& traits_of(const torch::optim::OptimizerOptions& options);

using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;
using ParamStates = ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>;

// Returns the settings of all groups. Throws InvalidArgument if they differ in what must be the same in all.
std::vector<GroupSettings> settings_of(const OptimizerTraits& traits, const ParamGroups& groups);

}  // namespace pacer::detail
