// What layers that take low-rank adapters have in common: pacer::modules::Linear, Conv1d, Conv2d, Conv3d and
// Embedding. lora.h does for a whole model, and checks first, what is done for one layer here.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <pacer/modules/lora_adapter.h>

namespace pacer::modules {

class LoraLayer {
 public:
  virtual ~LoraLayer() = default;

  // In the order in which they were added.
  const std::vector<LoraAdapter>& adapters() const { return adapters_; }
  // A null holder where there is none of that name.
  LoraAdapter adapter(const std::string& name) const;
  // Those that take part in forward and are trained, in the order in which they were added.
  std::vector<LoraAdapter> active_adapters() const;

  // The new one becomes the only active one.
  void add_adapter(const LoraOptions& lora);
  // The others stay active. InvalidArgument for one that is merged together with others.
  void remove_adapter(const std::string& name);
  // The adapters of these names are active, as far as the layer has them; the others are not. InvalidArgument
  // while an adapter is merged, and for what why_not_together() says.
  void set_active_adapters(const std::vector<std::string>& names);

  bool is_merged() const { return before_merge_.defined(); }
  // Adds all active adapters to the weight. InvalidArgument for what why_no_merge() says, and for sums that
  // the weight's dtype cannot hold. Waits for the device.
  void merge();
  // The weight has the bytes that it had. InvalidArgument where it was written to since merge().
  void unmerge();
  bool is_unmergeable() const { return !is_merged() || stored_weight()._version() == merged_version_; }
  // What the weight was before merge(), which unmerge() puts back; undefined where nothing is merged.
  const at::Tensor& weight_before_merge() const { return before_merge_; }

  // The shapes that the layer's adapters of this rank have.
  virtual LoraMatrices lora_matrices(int64_t r) const = 0;
  // Why the layer takes no such adapter, as the rest of a sentence that begins with its name; empty where it does.
  virtual std::string why_no_adapter(const LoraOptions& lora) const = 0;
  // Why no adapter can be merged into the weight, as the rest of a sentence about it; empty where one can.
  virtual std::string why_no_merge() const { return ""; }
  // Why these adapters cannot be active together, as the rest of a sentence that begins with the layer's name;
  // empty where they can.
  std::string why_not_together(const std::vector<std::string>& names) const;
  // The values of the weight; one in 4 bits is decoded to the dtype that it had.
  virtual at::Tensor weight_values() const { return stored_weight(); }
  // What the layer holds of its weight, of which adapters have the device; in 4 bits its codes.
  virtual at::Tensor stored_weight() const = 0;

 protected:
  LoraLayer() = default;
  LoraLayer(const LoraLayer&) = default;
  LoraLayer& operator=(const LoraLayer&) = default;

  // For reset(), in which a clone makes all that the original has.
  void renew_adapters();
  // For clone(): the copy can be unmerged as the original can.
  void take_merge_of(const LoraLayer& original);

 private:
  virtual torch::nn::Module& module() = 0;  // the layer itself
  void register_adapter(LoraAdapter adapter);

  std::vector<LoraAdapter> adapters_;
  std::vector<std::string> active_;
  at::Tensor before_merge_;
  uint32_t merged_version_ = 0;
};

}  // namespace pacer::modules
