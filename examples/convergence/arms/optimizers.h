// How the arms' optimizers are made: each function gives what makes one from the recipe that all arms share.
// No training code here.
#pragma once

#include <functional>
#include <memory>

#include <pacer/optimizers/onebit_adam.h>

#include "arms.h"

namespace convergence {

using OptimizerMaker = std::function<std::unique_ptr<torch::optim::Optimizer>(const OptimizerRecipe&)>;
// What an arm changes of the options that all arms of 1-bit Adam share.
using OneBitChange = std::function<void(const OptimizerRecipe&, pacer::OneBitAdamOptions&)>;

enum class Freeze { at_step, automatically };
enum class Workers { ranks, nodes };
// Learned positions travel as signs with all others, or stay in full precision.
enum class Positions { compressed, full_precision };

OptimizerMaker torch_adamw();
OptimizerMaker fused_adamw();
OptimizerMaker lamb();
OptimizerMaker muon();
OptimizerMaker normuon();
OptimizerMaker adamw_8bit();
// A single process compresses as well, or the arm would show nothing.
OptimizerMaker onebit_muon();
// For adapters alone.
OptimizerMaker lora();
// A single process compresses as well here, too.
OptimizerMaker onebit_adam(const OneBitChange& change = {}, Positions positions = Positions::compressed);
// The one that the hook ClippingRatio needs.
OptimizerMaker probing_onebit_adam();
OptimizerMaker onebit_lamb(Freeze freeze, Workers workers = Workers::ranks);

// By itself, at the latest after a third of the run, and not before a curriculum has ended.
void freeze_automatically(const OptimizerRecipe& recipe, pacer::OneBitAdamOptions& options);

}  // namespace convergence
