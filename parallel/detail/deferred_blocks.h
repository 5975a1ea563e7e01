// Blocks of a model whose parameters have no memory yet, and how they get values, one block after the other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/modules/blocks.h>
#include <pacer/modules/deferred.h>

namespace pacer::detail {

class DeferredBlocks {
 public:
  // What has no memory now. Throws InvalidArgument that names it for a parameter of the model that is in none of the stacks.
  DeferredBlocks(const torch::nn::Module& model, const std::vector<Blocks>& stacks);

  // Blocks with a parameter without memory, in order.
  struct Block {
    DeferredBlock block;
    std::vector<size_t> parameters;  // numbers of those without memory
  };
  const std::vector<Block>& blocks() const { return blocks_; }
  // The numbers of those parameters of the block whose values no checkpoint has.
  std::vector<size_t> without_values(const Block& block) const;
  const std::string& name(size_t parameter) const { return parameters_[parameter].name; }
  const at::Tensor& tensor(size_t parameter) const { return parameters_[parameter].parameter; }

  // Throws InvalidArgument that names a parameter whose values would come from nobody.
  void require_values(bool has_function) const;
  // For each parameter of the block that has none: memory of its own.
  void give_memory(const Block& block);
  // The parameters of the block have memory now: writes their values, those of a checkpoint where it had some. Throws
  // InvalidArgument that names the parameter where `f` left it without values, or gave it another shape, dtype or device.
  void fill(const Block& block, const MaterializeBlock& f);

 private:
  // A parameter, as it was before it had memory.
  struct Awaited {
    std::string name;
    at::Tensor parameter, value;  // `value` until it was written
    at::TensorOptions kind;
    std::vector<int64_t> sizes;
    bool has_value;  // of a checkpoint
    bool has_memory = false;
    int64_t version = 0;            // once it has memory
    const void* storage = nullptr;  // the same
  };
  void remember_memory(Awaited& awaited) const;
  void check(const Awaited& awaited) const;

  std::vector<Block> blocks_;
  std::vector<Awaited> parameters_;
};

}  // namespace pacer::detail
