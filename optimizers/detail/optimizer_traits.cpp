#include <pacer/optimizers/detail/optimizer_traits.h>

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include <pacer/optimizers/detail/option_visitors.h>

namespace pacer::detail {
namespace {

using torch::optim::OptimizerOptions;

constexpr char kFusedAdam[] = "FusedAdam", kFusedAdamW[] = "FusedAdamW", kFusedLamb[] = "FusedLamb";
constexpr char kOneBitAdam[] = "OneBitAdam", kOneBitLamb[] = "OneBitLamb";

template <class Options>
bool owns(const OptimizerOptions& options) {
  return dynamic_cast<const Options*>(&options) != nullptr;
}

template <class Options>
std::unique_ptr<OptimizerOptions> adopt(const OptimizerOptions& options, const OptimizerOptions& own) {
  if (owns<Options>(options)) return options.clone();
  if constexpr (kIsAdam<Options>) {
    using Torch = std::conditional_t<kIs<Options, FusedAdamOptions>, torch::optim::AdamOptions,
                                     torch::optim::AdamWOptions>;
    if (const auto* torch = dynamic_cast<const Torch*>(&options)) {
      auto adopted = std::make_unique<Options>(static_cast<const Options&>(own));
      adopted->take(*torch);
      return adopted;
    }
  }
  if constexpr (kIs<Options, OneBitAdamOptions>) {
    require(
        !owns<FusedAdamOptions>(options), kOneBitAdam,
        ": FusedAdamOptions add weight decay to the gradient (L2), which a momentum of signs cannot carry; "
        "use OneBitAdamOptions, whose decay is decoupled");
  }
  return nullptr;
}

template <class Options>
void check_options(const char* optimizer, const Options& options) {
  visit_options(options, CheckRanges{optimizer});
  if constexpr (!kIsAdam<Options>) {
    require(!options.wants_amsgrad(), optimizer,
            ": amsgrad was set, which this optimizer does not have; leave it");
  }
  if constexpr (kIsOneBit<Options>) {
    require(
        options.master_weights() != MasterWeights::none, optimizer,
        ": 16-bit parameters need a master copy or a remainder, because signs of one scale are too coarse "
        "for 8 bits; leave master_weights at automatic");
  } else {
    require(options.rounding() == Rounding::nearest || options.master_weights() == MasterWeights::none,
            optimizer,
            ": stochastic rounding is for bf16 parameters without master weights; set "
            "master_weights(MasterWeights::none) as well, or leave rounding at nearest");
  }
  if constexpr (kIsLamb<Options>) {
    require(options.max_coeff() >= options.min_coeff(), optimizer,
            ": max_coeff must be a finite number >= min_coeff (", options.min_coeff(), "), not ",
            options.max_coeff());
  }
  if constexpr (kIs<Options, OneBitLambOptions>) {
    require(options.factor_max() >= options.factor_min(), optimizer,
            ": factor_max must be a finite number >= factor_min (", options.factor_min(), "), not ",
            options.factor_max());
  }
}

template <class Options>
kernels::WeightDecay decay_mode(const Options& options) {
  if (options.weight_decay() == 0 || kIsLamb<Options>) return kernels::WeightDecay::none;
  return kIs<Options, FusedAdamOptions> ? kernels::WeightDecay::l2 : kernels::WeightDecay::decoupled;
}

template <class Options, const char* kName>
AdamGroupSettings settings(const OptimizerOptions& base) {
  const auto& options = static_cast<const Options&>(base);
  check_options(kName, options);
  AdamGroupSettings settings;
  kernels::AdamSettings& kernel = settings.kernel;
  kernel.learning_rate = options.lr();
  kernel.beta1 = std::get<0>(options.betas());
  kernel.beta2 = std::get<1>(options.betas());
  kernel.epsilon = options.eps();
  kernel.weight_decay = options.weight_decay();
  kernel.decay_mode = decay_mode(options);
  kernel.bias_correction = options.bias_correction();
  settings.master_weights = options.master_weights();
  if constexpr (kIsAdam<Options>) settings.amsgrad = options.amsgrad();
  if constexpr (kIsLamb<Options>) {
    kernel.rule = kernels::UpdateRule::lamb;
    kernel.min_coeff = options.min_coeff();
    kernel.max_coeff = options.max_coeff();
    kernel.adapt = options.adapt();
  }
  if constexpr (kIsOneBit<Options>) {
    settings.compress = options.compress();
  } else {
    kernel.seed = options.seed();
    settings.finite_check = options.finite_check();
    settings.rounding = options.rounding();
  }
  if constexpr (kIs<Options, OneBitLambOptions>) {
    kernel.coeff_beta = options.coeff_beta();
    settings.averages_trust = options.compress();
    settings.factor_bounds = {options.factor_min(), options.factor_max(), options.factor_threshold()};
  }
  return settings;
}

template <class Options>
OneBitChoices choices(const OptimizerOptions& base) {
  OneBitChoices choices;
  if constexpr (kIsOneBit<Options>) {
    const auto& options = static_cast<const Options&>(base);
    choices.freeze_step = options.freeze_step();
    choices.freeze_automatically = options.freeze_automatically();
    choices.allow_early_freeze = options.allow_early_freeze();
    if constexpr (kIs<Options, OneBitAdamOptions>)
      choices.refresh_variance_every = options.refresh_variance_every();
    choices.variance_floor = options.variance_floor();
    choices.scale = options.scale();
    choices.block_scales = options.block_scales();
    choices.compress_alone = options.compress_alone();
    choices.hierarchical = options.hierarchical();
    choices.one_bit = options.one_bit();
  }
  return choices;
}

template <class State>
std::unique_ptr<torch::optim::OptimizerParamState> make_state() {
  return std::make_unique<State>();
}

template <class Options>
void export_options(const OptimizerOptions& options, const std::string& prefix, NamedTensors& state) {
  visit_options(static_cast<const Options&>(options), WriteByName{prefix, state});
}

template <class Options>
std::unique_ptr<OptimizerOptions> import_options(const std::string& prefix, const NamedTensors& state,
                                                 int64_t version, std::set<std::string>& used) {
  auto options = std::make_unique<Options>();
  visit_options(*options, ReadByName{prefix, state, version, used});
  return options;
}

template <class Options>
bool alike(const OptimizerOptions& a, const OptimizerOptions& b) {
  Options left = static_cast<const Options&>(a);
  const auto& right = static_cast<const Options&>(b);
  left.lr(right.lr()).initial_lr(right.initial_lr());
  return equal_options(left, right);
}

template <class Options>
double base_lr(OptimizerOptions& base) {
  auto& options = static_cast<Options&>(base);
  if (!options.initial_lr()) options.initial_lr(options.lr());
  return *options.initial_lr();
}

template <class Options>
void set_base_lr(OptimizerOptions& base, double rate) {
  static_cast<Options&>(base).initial_lr(rate);
}

template <class Options, class State, const char* kName>
constexpr OptimizerTraits traits() {
  return {kName,
          kIsOneBit<Options>,
          owns<Options>,
          adopt<Options>,
          settings<Options, kName>,
          choices<Options>,
          make_state<State>,
          export_options<Options>,
          import_options<Options>,
          alike<Options>,
          base_lr<Options>,
          set_base_lr<Options>};
}

}  // namespace

CompressionOptions OneBitChoices::compression() const {
  return CompressionOptions().scale(scale).block_scales(block_scales).hierarchical(hierarchical);
}

std::vector<AdamGroupSettings> settings_of(const OptimizerTraits& traits, const ParamGroups& groups) {
  std::vector<AdamGroupSettings> settings;
  for (const auto& group : groups) settings.push_back(traits.settings(group.options()));
  for (size_t g = 1; g < settings.size(); ++g) {
    require(settings[g].finite_check == settings[0].finite_check, traits.name, ": finite_check is ",
            settings[0].finite_check ? "on" : "off", " in group 0 and ",
            settings[g].finite_check ? "on" : "off", " in group ", g,
            "; it covers the whole step, so set it alike in all groups");
  }
  return settings;
}

const OptimizerTraits kAdamTraits = traits<FusedAdamOptions, FusedAdamParamState, kFusedAdam>();
const OptimizerTraits kAdamWTraits = traits<FusedAdamWOptions, FusedAdamWParamState, kFusedAdamW>();
const OptimizerTraits kLambTraits = traits<FusedLambOptions, FusedLambParamState, kFusedLamb>();
const OptimizerTraits kOneBitAdamTraits = traits<OneBitAdamOptions, OneBitAdamParamState, kOneBitAdam>();
const OptimizerTraits kOneBitLambTraits = traits<OneBitLambOptions, OneBitLambParamState, kOneBitLamb>();

}  // namespace pacer::detail
