// Which rows of parameters steps change, where users said so (FusedOptimizer::set_visible_rows). What they said is kept
// here; tables have it as kernels take it.
#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/optimizers/detail/dtype_table.h>
#include <pacer/optimizers/detail/optimizer_traits.h>
#include <pacer/optimizers/detail/parameter_entry.h>
#include <pacer/optimizers/tensor_names.h>

namespace pacer::detail {

class VisibleRows {
 public:
  // `visible`: Bool, one for each row of the parameter, on its device; undefined: all rows again.
  void set(const at::Tensor& parameter, const at::Tensor& visible);
  // Whether the next step changes some rows only.
  bool has_masks() const { return !masks_.empty(); }
  // Whether it changes all, as the step before did: then there is nothing to give.
  bool stay_all() const { return masks_.empty() && !tables_have_rows_; }

  // Gives the tables the masks of a step, and says whether another kernel is needed than in the step before. Throws
  // InvalidArgument where an entry cannot be updated by rows.
  bool give(const OptimizerTraits& traits, const std::vector<GroupSettings>& settings,
            const std::vector<ParameterEntry>& entries, std::vector<DtypeTable>& tables);

 private:
  struct Mask {
    HeldAddress parameter;
    at::Tensor visible;
  };
  const Mask* find(const at::Tensor& parameter) const;

  std::vector<Mask> masks_;
  bool tables_have_rows_ = false;
};

// Throws InvalidArgument where such a parameter cannot be updated by rows, and says why. `name` as in messages.
void check_has_rows(const OptimizerTraits& traits, const GroupSettings& settings, const at::Tensor& parameter,
                    const std::string& name);

}  // namespace pacer::detail
