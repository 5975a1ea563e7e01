#include <pacer/optimizers/detail/visible_rows.h>

#include <algorithm>

#include <pacer/core/error.h>
#include <pacer/optimizers/detail/optimizer_view.h>

namespace pacer::detail {

void check_has_rows(const OptimizerTraits& traits, const GroupSettings& settings, const at::Tensor& parameter,
                    const std::string& name) {
  const InMessage who{name, parameter.sizes()};
  require(!traits.is_onebit && !traits.averages && settings.kernel.rule == kernels::UpdateRule::adam &&
              !settings.muon,
          traits.name, " cannot update ", who,
          " by rows, because its rule is about whole tensors, or about all steps; use FusedAdam, FusedAdamW, "
          "FusedSgd or FusedRmsprop");
  require(settings.state_bits == 32, traits.name, " cannot update ", who,
          " by rows, because moments in 8 bits share scales between rows; set state_bits(32)");
  require(parameter.dim() > 0, traits.name, " cannot update ", who, " by rows: it is a single number");
  require(parameter.is_contiguous(), traits.name, " cannot update ", who,
          " by rows, because its rows do not lie one behind the other; make it contiguous()");
}

const VisibleRows::Mask* VisibleRows::find(const at::Tensor& parameter) const {
  const auto found = std::find_if(masks_.begin(), masks_.end(), [&](const Mask& mask) {
    return mask.parameter._unsafe_get_target() == parameter.unsafeGetTensorImpl();
  });
  return found == masks_.end() ? nullptr : &*found;
}

void VisibleRows::set(const at::Tensor& parameter, const at::Tensor& visible) {
  const Mask* const found = find(parameter);
  if (found != nullptr) masks_.erase(masks_.begin() + (found - masks_.data()));
  if (visible.defined()) masks_.push_back({HeldAddress(parameter.getIntrusivePtr()), visible});
}

bool VisibleRows::give(const OptimizerTraits& traits, const std::vector<GroupSettings>& settings,
                       const std::vector<ParameterEntry>& entries, std::vector<DtypeTable>& tables) {
  const auto for_masks = [&](const auto& work) {
    for (const ParameterEntry& entry : entries) {
      if (const Mask* const mask = find(entry.parameter)) work(entry, mask->visible);
    }
  };
  for_masks([&](const ParameterEntry& entry, const at::Tensor& visible) {
    check_has_rows(traits, settings[entry.group], entry.parameter, entry.name);
    const InMessage who{entry.name, entry.parameter.sizes()};
    require(!entry.range.is_part(), traits.name, " cannot update ", who,
            " by rows, because ranks share it out; leave out Shards, or set_visible_rows");
    require(visible.device() == entry.parameter.device() && visible.numel() == entry.parameter.size(0),
            traits.name, ": ", visible.numel(), " numbers on ", visible.device(), " say which rows of ", who,
            " on ", entry.parameter.device(),
            " are visible; call set_visible_rows after a parameter has changed");
  });
  std::vector<std::vector<kernels::RowMask>> masks(tables.size());  // empty: all rows of a table
  for_masks([&](const ParameterEntry& entry, const at::Tensor& visible) {
    std::vector<kernels::RowMask>& of_table = masks[entry.table];
    of_table.resize(tables[entry.table].tensors());
    const int64_t width = visible.numel() == 0 ? 0 : entry.range.count / visible.numel();
    of_table[entry.position] = {visible.const_data_ptr<bool>(), width};
  });
  tables_have_rows_ = true;  // also where what follows throws
  bool is_another_kernel = false;
  for (size_t i = 0; i < tables.size(); ++i) {
    is_another_kernel = tables[i].set_rows(masks[i]) || is_another_kernel;
  }
  tables_have_rows_ = !masks_.empty();
  return is_another_kernel;
}

}  // namespace pacer::detail
