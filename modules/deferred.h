// Blocks whose parameters have no memory until ranks share them out, for a model that is larger than a machine: it is made
// block by block, each of which gives its memory back at once, and Shards gives values to one block at a time, of which each
// rank keeps its part.
//
//   for (int i = 0; i < 80; ++i) {
//     model->blocks->push_back(Block(8192));
//     pacer::defer_initialization(*model->blocks[i], world->device());
//   }
//   pacer::FusedAdamW optimizer(model->named_parameters(), pacer::FusedAdamWOptions(3e-4));
//   pacer::Session session(*model, optimizer, world);
//   session.use(pacer::Shards(model->blocks,
//                             pacer::ShardsOptions().materialize(pacer::reset_blocks<BlockImpl>(/*seed=*/1))));
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <typeinfo>

#include <c10/core/TensorOptions.h>
#include <c10/util/Type.h>
#include <torch/nn/module.h>

#include <pacer/core/error.h>

namespace pacer {

// Takes the memory of all parameters of the module, which keep their shape and stay the tensors that they are: an optimizer can
// be made with them. Nothing is copied, so this is also how they get another device or, those of floating point, another dtype,
// where `options` has one: defer_initialization(block, torch::device(torch::kCUDA).dtype(torch::kBFloat16)). It can be called
// again. Buffers keep their values and move to the device, too. Whoever reads or writes a parameter before it has values gets an
// error that names it. Only a Session with Shards of Blocks gives values; every other one refuses such a model. Throws
// InvalidArgument, changing nothing, for a parameter on the meta device and for one that is not contiguous.
void defer_initialization(torch::nn::Module& module, const c10::TensorOptions& options = {});

// Returns whether the tensor is a parameter without memory, as defer_initialization leaves it.
bool is_deferred(const at::Tensor& tensor);

// A block whose parameters have memory now, and no values yet.
struct DeferredBlock {
  torch::nn::Module& module;
  size_t index;      // among the blocks of all stacks that Shards was given, from 0
  std::string name;  // in the model: "blocks.3"
};
// Writes values to every parameter of the block that is_deferred was true for, in place or by set_data, without changing
// shape, dtype or device. It runs without gradients, on every rank, for one block after the other.
using MaterializeBlock = std::function<void(const DeferredBlock& block)>;

// Calls `initialize` for each block, with LibTorch's generator of the block's device seeded by `seed` and the block's index.
// Every rank, and every number of ranks, gets the same bits on the same kind of device. The generator goes on afterwards as if
// nothing had been drawn.
MaterializeBlock seeded_blocks(uint64_t seed, std::function<void(torch::nn::Module& block)> initialize);

// The same with Block::reset_parameters(), a public member function that gives every parameter of the block its values, as
// torch::nn::LinearImpl and pacer::modules::LinearImpl have one. Throws InvalidArgument for a block of another class.
template <class Block>
MaterializeBlock reset_blocks(uint64_t seed) {
  return seeded_blocks(seed, [](torch::nn::Module& module) {
    auto* block = dynamic_cast<Block*>(&module);
    require(block != nullptr, "reset_blocks was given the class ", c10::demangle(typeid(Block).name()),
            ", but a block is a ", module.name(), "; write seeded_blocks with a function for all of them");
    block->reset_parameters();
  });
}

}  // namespace pacer
