// How a run goes on from a base: the weights of another run, frozen or not, in 4 bits or not, with adapters
// or without. Which arm does what is in arms.cpp; which text and rate it has, Settings::for_fine_tuning().
//
//   begin_from("run/convergence/base-seed-1/weights.safetensors", find_arm("qlora"), settings, &model);
#pragma once

#include <filesystem>

#include "arms.h"
#include "convergence/model/gpt.h"
#include "convergence/settings.h"

namespace convergence {

// Gives the model, on the CPU, the weights in the file, which are those of a Gpt that is not fused. Then what
// the arm asks for: 4 bits, then adapters, drawn from LibTorch's default generator, and all else frozen.
void begin_from(const std::filesystem::path& weights, const Arm& arm, const Settings& settings, Gpt* model);

// Throws pacer::InvalidArgument for arms that need a base where the study has none.
void check_fine_tuning(const Settings& settings);

}  // namespace convergence
