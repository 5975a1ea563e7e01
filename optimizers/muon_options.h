// Options of Muon and OneBitMuon. Setters chain: MuonOptions(3e-4).momentum(0.95).split(3).
#pragma once

#include <cstdint>

#include <pacer/core/option.h>
#include <pacer/optimizers/adam_options.h>
#include <pacer/optimizers/onebit_options.h>

namespace pacer {

// The factor of Muon's steps, for a matrix of r rows and c columns.
enum class MuonAdjustment {
  match_rms_adamw,  // 0.2 sqrt(max(r, c)): steps are as large as AdamW's, whose rates and decay then fit
  original,         // sqrt(max(1, r / c)): as in K. Jordan's Muon
};

// The coefficients (a, b, c) of Muon's iterations X <- a X + b (X X^T) X + c (X X^T)^2 X.
enum class MuonCoefficients {
  quintic,        // (3.4445, -4.7750, 2.0315) each time; singular values end between 0.7 and 1.2
  polar_express,  // others each time (arXiv:2505.16932), closer to 1 as iterations go on
};

// The dtype of Muon's matrix products.
enum class MuonPrecision {
  automatic,  // bf16 on a GPU, fp32 on a CPU
  bf16,
  fp32,
};

// Muon for hidden matrices, AdamW for all else, by group: orthogonalize says which of the two rules its
// parameters get. `Own` is the struct of one optimizer.
template <class Own>
struct MuonOptionsOf : public FusedOptionsOf<Own> {
  // True: Muon's rule, for parameters of two dimensions or more, of which the first are the rows. Betas and
  // eps are not read then, and the step is not corrected for the momentum's start at zero. False: AdamW's
  // rule, for embeddings, the last layer, and vectors. It must stay as it is once the group has taken a step.
  PACER_OPTION(bool, orthogonalize) = true;
  // The decay rate of the momentum, in [0, 1).
  PACER_OPTION(double, momentum) = 0.95;
  // Nesterov's momentum: a step looks ahead, by the gradient and the momentum together. Muon orthogonalises the two as one;
  // SGD needs a momentum above 0 and no dampening for it.
  PACER_OPTION(bool, nesterov) = true;
  // The factor of Muon's steps; torch.optim.Muon's default is original.
  PACER_OPTION(MuonAdjustment, adjust_lr_fn) = MuonAdjustment::match_rms_adamw;
  // How many iterations orthogonalise a matrix, 1 to 100.
  PACER_OPTION(int64_t, ns_steps) = 5;
  // The coefficients of the iterations.
  PACER_OPTION(MuonCoefficients, ns_coefficients) = MuonCoefficients::quintic;
  // The dtype of the matrix products. fp64 parameters take fp64.
  PACER_OPTION(MuonPrecision, precision) = MuonPrecision::automatic;
  // A matrix consists of so many of equal size, one below the other, and each is orthogonalised by itself: 3
  // for query, key and value in one, or the number of heads. It must divide the rows.
  PACER_OPTION(int64_t, split) = 1;
  // NorMuon (arXiv:2510.05491): each row of an orthogonalised matrix, or of a piece of it, is divided by the
  // root of a running mean of its squares, and the whole then brought back to the norm that it had. So no row
  // moves much faster than others.
  PACER_OPTION(bool, normalize_rows) = false;
  // The decay rate of the mean of squares of normalize_rows, in [0, 1).
  PACER_OPTION(double, row_beta) = 0.95;
  // Cautious weight decay (arXiv:2510.12402): only weights that the step itself brings nearer to zero, or does
  // not move, decay.
  PACER_OPTION(bool, cautious_decay) = false;

 protected:
  explicit MuonOptionsOf(double learning_rate) { this->lr(learning_rate).weight_decay(0.1); }
  // The options of a group that takes AdamW.
  explicit MuonOptionsOf(const FusedAdamWOptions& options);
};

// The options of Muon.
struct MuonOptions : public MuonOptionsOf<MuonOptions> {
  MuonOptions(double learning_rate = 1e-3) : MuonOptionsOf(learning_rate) {}
  // The options of a group that takes AdamW.
  MuonOptions(const FusedAdamWOptions& options) : MuonOptionsOf(options) {}
};

// The options of 1-bit Muon.
struct OneBitMuonOptions : public MuonOptionsOf<OneBitMuonOptions>, public SignOptionsOf<OneBitMuonOptions> {
  OneBitMuonOptions(double learning_rate = 1e-3) : MuonOptionsOf(learning_rate) { block_scales(true); }
  // The options of a group that takes AdamW.
  OneBitMuonOptions(const FusedAdamWOptions& options) : MuonOptionsOf(options) { block_scales(true); }
};

}  // namespace pacer
