// Weights of a model whose blocks were deferred (modules/deferred.h), read from files for one block at a time.
//
//   session.use(pacer::Shards(model->blocks,
//                             pacer::ShardsOptions().materialize(pacer::load_blocks("run/checkpoints"))));
#pragma once

#include <string>

#include <pacer/modules/deferred.h>

namespace pacer {

// Returns a function for ShardsOptions::materialize that reads what load_weights would write to a block's parameters and
// buffers. `path` is one of load_weights, whose names are the model's ("blocks.3.weight"). Values are converted between dtypes of
// floating point, as there. Each rank reads the files for itself, the values of one block at a time; the files of a checkpoint
// are also read once before, to compare them with their checksums. Tensors of the files that no block has are passed over: load
// the rest of the model with load_weights before it is deferred, or from a model without the blocks.
//
// The function throws, when a Session calls it, InvalidArgument for a parameter that the files do not have, for other shapes
// and dtypes, and for weights in 4 bits; FileError for files that are not there, cannot be read or are damaged. Nothing of the
// block was changed then.
MaterializeBlock load_blocks(const std::string& path);

}  // namespace pacer
