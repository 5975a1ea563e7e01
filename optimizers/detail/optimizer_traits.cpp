#include <pacer/optimizers/detail/optimizer_traits.h>

#include <array>

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <pacer/kernels/adam_8bit.h>
#include <pacer/kernels/rmsprop.h>
#include <pacer/kernels/schedule_free.h>
#include <pacer/kernels/sgd.h>
#include <pacer/optimizers/detail/group_defaults.h>
#include <pacer/optimizers/detail/option_visitors.h>

namespace pacer::detail {
namespace {

using torch::optim::OptimizerOptions;

void check_paging(const char* optimizer, const Paging& paging) {
  constexpr int64_t kSmallestPage = 4096;
  require(paging.resident_bytes() >= 0, optimizer, ": resident_bytes must be >= 0, not ",
          paging.resident_bytes());
  require(paging.headroom() >= 0, optimizer, ": headroom must be >= 0 bytes, not ", paging.headroom());
  require(paging.page_bytes() >= kSmallestPage, optimizer, ": page_bytes must be >= ", kSmallestPage,
          ", not ", paging.page_bytes());
}

void check_sgd(const char* optimizer, const FusedSgdOptions& options) {
  require(!options.nesterov() || (options.momentum() > 0 && options.dampening() == 0), optimizer,
          ": Nesterov's momentum needs a momentum above 0 and a dampening of 0, not ", options.momentum(),
          " and ", options.dampening());
  require(
      !options.paged() || options.momentum() > 0, optimizer,
      ": without a momentum there is no buffer that could be paged; leave paged unset, or set a momentum");
}

template <class Options>
void check_state_bits(const char* optimizer, const Options& options) {
  const int64_t bits = options.state_bits();
  require(bits == 8 || bits == 32, optimizer, ": state_bits must be 8 or 32, not ", bits);
  if (bits == 32) return;
  if constexpr (kIs<OneBitMuonOptions, Options>) {
    require(
        !options.orthogonalize(), optimizer,
        ": a momentum that is each rank's own stays in 32 bits; set state_bits(8) in the options of groups "
        "with orthogonalize(false)");
  } else {
    require(kIsAdam<Options> || kIsLamb<Options> || kIsMuon<Options>, optimizer,
            ": its rule has no state in 8 bits; leave state_bits at 32");
  }
  require(!options.wants_amsgrad(), optimizer,
          ": a running maximum (amsgrad) has no codes in 8 bits; leave state_bits at 32");
}

void check_averaging(const char* optimizer, const ScheduleFreeAdamWOptions& options) {
  constexpr double kLargestPower = 16;  // the powers of all steps and rates that there are are numbers then
  require(std::get<0>(options.betas()) > 0, optimizer,
          ": the first beta must be > 0, because the average is not stored but follows from the weights of "
          "training, which would have nothing of it");
  require(options.warmup_steps() >= 0, optimizer, ": warmup_steps must be >= 0, not ",
          options.warmup_steps());
  for (const auto& [name, power] :
       {std::make_pair("r", options.r()), std::make_pair("weight_lr_power", options.weight_lr_power())}) {
    require(power >= 0 && power <= kLargestPower, optimizer, ": ", name, " must be in [0, ", kLargestPower,
            "], not ", power);
  }
}

template <class Options>
void check_options(const char* optimizer, const Options& options) {
  check_ranges(optimizer, options);
  if constexpr (kIsSgd<Options>) {
    check_sgd(optimizer, options);
  } else if constexpr (!kIsAdam<Options> && kHasBetas<Options>) {
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
    if (options.paged()) check_paging(optimizer, *options.paged());
    if constexpr (kHasBetas<Options>) check_state_bits(optimizer, options);
  }
  if constexpr (kIsLamb<Options>) {
    require(options.max_coeff() >= options.min_coeff(), optimizer,
            ": max_coeff must be a finite number >= min_coeff (", options.min_coeff(), "), not ",
            options.max_coeff());
  }
  if constexpr (kIsMuon<Options>) {
    require(options.ns_steps() >= 1 && options.ns_steps() <= 100, optimizer,
            ": ns_steps must be from 1 to 100, not ", options.ns_steps());
    require(options.split() >= 1, optimizer, ": split must be >= 1, not ", options.split());
    require(!options.paged(), optimizer,
            ": a momentum that is orthogonalised cannot come page by page; leave paged unset");
  }
  if constexpr (kIsScheduleFree<Options>) check_averaging(optimizer, options);
  if constexpr (kIs<OneBitLambOptions, Options>) {
    require(options.factor_max() >= options.factor_min(), optimizer,
            ": factor_max must be a finite number >= factor_min (", options.factor_min(), "), not ",
            options.factor_max());
  }
}

template <class Options>
kernels::WeightDecay decay_mode(const Options& options) {
  if (options.weight_decay() == 0 || kIsLamb<Options>) return kernels::WeightDecay::none;
  const bool is_l2 = kIs<FusedAdamOptions, Options> || !kHasBetas<Options>;
  return is_l2 ? kernels::WeightDecay::l2 : kernels::WeightDecay::decoupled;
}

void set_sgd(const FusedSgdOptions& options, GroupSettings& settings) {
  using kernels::SgdMomentum;
  settings.kernel.beta1 = options.momentum();
  settings.kernel.beta2 = options.dampening();
  settings.kernel.bias_correction = 0;
  settings.has_first_moment = options.momentum() > 0;
  settings.has_second_moment = false;
  settings.starts_at_gradient = true;
  settings.maximizes = options.maximize();
  settings.loops = &kernels::sgd_update(!settings.has_first_moment ? SgdMomentum::none
                                        : options.nesterov()       ? SgdMomentum::nesterov
                                                                   : SgdMomentum::plain);
}

void set_rmsprop(const FusedRmspropOptions& options, GroupSettings& settings) {
  settings.kernel.beta1 = options.momentum();
  settings.kernel.beta2 = options.alpha();
  settings.kernel.epsilon = options.eps();
  settings.kernel.bias_correction = 0;
  settings.has_second_moment = options.momentum() > 0;
  settings.amsgrad = options.centered();  // a third tensor
  settings.maximizes = options.maximize();
  settings.loops = &kernels::rmsprop_update(settings.has_second_moment, options.centered());
}

template <class Options>
GroupSettings settings_of(const Options& options) {
  GroupSettings settings;
  kernels::RuleSettings& kernel = settings.kernel;
  kernel.learning_rate = options.lr();
  kernel.weight_decay = options.weight_decay();
  kernel.decay_mode = decay_mode(options);
  settings.master_weights = options.master_weights();
  if constexpr (kIsSgd<Options>) {
    set_sgd(options, settings);
  } else if constexpr (kIsRmsprop<Options>) {
    set_rmsprop(options, settings);
  } else {
    kernel.beta1 = std::get<0>(options.betas());
    kernel.beta2 = std::get<1>(options.betas());
    kernel.epsilon = options.eps();
    kernel.bias_correction = options.bias_correction();
    settings.amsgrad = options.wants_amsgrad();
  }
  if constexpr (kIsLamb<Options>) {
    kernel.rule = kernels::UpdateRule::lamb;
    kernel.min_coeff = options.min_coeff();
    kernel.max_coeff = options.max_coeff();
    kernel.adapt = options.adapt();
  }
  if constexpr (kIsOneBit<Options>) {
    settings.onebit.compress(options.compress());
    const auto copy = [](const OptionField&, auto& own, const auto& value) { own = value; };
    visit_freeze_options(copy, settings.onebit, options);
    visit_exchange_options(copy, settings.onebit, options);
  } else {
    kernel.seed = options.seed();
    settings.finite_check = options.finite_check();
    settings.rounding = options.rounding();
    settings.paging = options.paged();
  }
  if constexpr (!kIsOneBit<Options> && kHasBetas<Options>) {
    settings.state_bits = options.state_bits();
    if (settings.state_bits == 8 && !kIsLamb<Options>) settings.loops = &kernels::kAdam8BitUpdate;
  }
  if constexpr (kIs<OwnRuleOptions, Options>) {
    settings.loops = &options.rule().loops();
    settings.has_second_moment = options.rule().has_second_moment();
  }
  if constexpr (kIsScheduleFree<Options>) {
    settings.loops = &kernels::kScheduleFreeUpdate;
    kernel.rule = kernels::UpdateRule::schedule_free;
    kernel.averaging = {options.warmup_steps(), options.r(), options.weight_lr_power()};
  }
  if constexpr (kIs<OneBitMuonOptions, Options>) settings.compression = options.compression();
  if constexpr (kIsMuon<Options>) {
    if (options.orthogonalize()) {
      settings.muon =
          MuonSettings{options.nesterov(),       options.adjust_lr_fn(), options.ns_coefficients(),
                       options.precision(),      options.ns_steps(),     options.split(),
                       options.normalize_rows(), options.row_beta(),     options.cautious_decay()};
      settings.has_second_moment = false;
      kernel.beta1 = options.momentum();
      kernel.bias_correction = 0;
    }
  }
  if constexpr (kIs<OneBitLambOptions, Options>) {
    kernel.coeff_beta = options.coeff_beta();
    settings.averages_trust = options.compress();
    settings.factor_bounds = {options.factor_min(), options.factor_max(), options.factor_threshold()};
  }
  return settings;
}

// Torch's optimizer of the same rule: its name, null where there is none, and its options.
template <class Options>
struct TorchsOf {
  static constexpr const char* kName = nullptr;
};
template <>
struct TorchsOf<FusedAdamOptions> {
  static constexpr const char* kName = "torch::optim::Adam";
  using type = torch::optim::AdamOptions;
};
template <>
struct TorchsOf<FusedAdamWOptions> {
  static constexpr const char* kName = "torch::optim::AdamW";
  using type = torch::optim::AdamWOptions;
};
template <>
struct TorchsOf<FusedSgdOptions> {
  static constexpr const char* kName = "torch::optim::SGD";
  using type = torch::optim::SGDOptions;
};
template <>
struct TorchsOf<FusedRmspropOptions> {
  static constexpr const char* kName = "torch::optim::RMSprop";
  using type = torch::optim::RMSpropOptions;
};

template <class Options, class State>
class TraitsOf final : public OptimizerTraits {
 public:
  explicit TraitsOf(const char* optimizer = kOptimizerOf<Options>)
      : OptimizerTraits(optimizer, TorchsOf<Options>::kName, kIsOneBit<Options>, kIsMuon<Options>,
                        kIsScheduleFree<Options>) {}

  bool owns(const OptimizerOptions& options) const override {
    const auto* own = dynamic_cast<const Options*>(&options);
    if constexpr (kIs<OwnRuleOptions, Options>) return own != nullptr && &own->rule().traits() == this;
    return own != nullptr;
  }

  std::unique_ptr<OptimizerOptions> adopt(const OptimizerOptions& options,
                                          const OptimizerOptions& own) const override {
    if (owns(options)) return options.clone();
    if constexpr (kHasTorch<Options>) {
      using Torch = typename TorchsOf<Options>::type;
      if (const auto* torch = dynamic_cast<const Torch*>(&options)) {
        auto adopted = std::make_unique<Options>(own_type(own));
        adopted->take(*torch);
        return adopted;
      }
    }
    if constexpr (kIsMuon<Options>) {
      if (const auto* adamw = dynamic_cast<const FusedAdamWOptions*>(&options)) {
        return std::make_unique<Options>(*adamw);
      }
      if (const auto* torch = dynamic_cast<const torch::optim::AdamWOptions*>(&options)) {
        auto adopted = std::make_unique<Options>(FusedAdamWOptions(*torch));
        const Options& rest = own_type(own);
        adopted->bias_correction(rest.bias_correction()).master_weights(rest.master_weights());
        adopted->finite_check(rest.finite_check()).rounding(rest.rounding()).seed(rest.seed());
        return adopted;
      }
    }
    if constexpr (kIs<OneBitAdamOptions, Options>) {
      require(dynamic_cast<const FusedAdamOptions*>(&options) == nullptr, name,
              ": FusedAdamOptions add weight decay to the gradient (L2), which a momentum of signs cannot "
              "carry; use OneBitAdamOptions, whose decay is decoupled");
    }
    return nullptr;
  }

  void inherit(OptimizerOptions& options, const OptimizerOptions& defaults) const override {
    if constexpr (kGroupsInheritDefaults && kHasTorch<Options>) {
      take_unchanged(own_type(defaults), static_cast<Options&>(options));
    }
  }

  GroupSettings settings(const OptimizerOptions& options) const override {
    check_options(name, own_type(options));
    return settings_of(own_type(options));
  }

  std::unique_ptr<torch::optim::OptimizerParamState> make_state() const override {
    return std::make_unique<State>();
  }

  void export_options(const OptimizerOptions& options, const std::string& prefix,
                      NamedTensors& state) const override {
    write_options(own_type(options), prefix, state);
  }

  std::unique_ptr<OptimizerOptions> import_options(const std::string& prefix, const NamedTensors& state,
                                                   int64_t version, const OptimizerOptions& own,
                                                   std::set<std::string>& used) const override {
    const auto make = [&] {
      if constexpr (kIs<OwnRuleOptions, Options>) {
        return std::make_unique<Options>(own_type(own).rule());
      } else {
        return std::make_unique<Options>();
      }
    };
    auto options = make();
    take_unsaved(own_type(own), *options);
    read_options(*options, prefix, state, version, used);
    return options;
  }

  void visit_numbers(const OptimizerOptions& options, NumberVisitor& visit) const override {
    detail::visit_numbers(own_type(options), visit);
  }

  double base_lr(OptimizerOptions& base) const override {
    auto& options = static_cast<Options&>(base);
    if (!options.initial_lr()) options.initial_lr(options.lr());
    return *options.initial_lr();
  }

  void set_base_lr(OptimizerOptions& options, double rate) const override {
    static_cast<Options&>(options).initial_lr(rate);
  }

 private:
  static const Options& own_type(const OptimizerOptions& options) {
    return static_cast<const Options&>(options);
  }
};

}  // namespace

std::vector<GroupSettings> settings_of(const OptimizerTraits& traits, const ParamGroups& groups) {
  std::vector<GroupSettings> settings;
  for (const auto& group : groups) settings.push_back(traits.settings(group.options()));
  for (size_t g = 1; g < settings.size(); ++g) {
    require(settings[g].finite_check == settings[0].finite_check, traits.name, ": finite_check is ",
            settings[0].finite_check ? "on" : "off", " in group 0 and ",
            settings[g].finite_check ? "on" : "off", " in group ", g,
            "; it covers the whole step, so set it alike in all groups");
  }
  return settings;
}

const OptimizerTraits* find_traits(const OptimizerOptions& options) {
  if (const auto* own = dynamic_cast<const OwnRuleOptions*>(&options)) return &own->rule().traits();
  static const TraitsOf<FusedAdamOptions, FusedAdamParamState> adam;
  static const TraitsOf<FusedAdamWOptions, FusedAdamWParamState> adamw;
  static const TraitsOf<FusedLambOptions, FusedLambParamState> lamb;
  static const TraitsOf<FusedSgdOptions, FusedSgdParamState> sgd;
  static const TraitsOf<FusedRmspropOptions, FusedRmspropParamState> rmsprop;
  static const TraitsOf<MuonOptions, MuonParamState> muon;
  static const TraitsOf<OneBitMuonOptions, OneBitMuonParamState> onebit_muon;
  static const TraitsOf<OneBitAdamOptions, OneBitAdamParamState> onebit_adam;
  static const TraitsOf<OneBitLambOptions, OneBitLambParamState> onebit_lamb;
  static const TraitsOf<ScheduleFreeAdamWOptions, ScheduleFreeAdamWParamState> schedule_free;
  const std::array<const OptimizerTraits*, 10> all = {
      &adam, &adamw, &lamb, &sgd, &rmsprop, &muon, &onebit_muon, &onebit_adam, &onebit_lamb, &schedule_free};
  for (const OptimizerTraits* traits : all) {
    if (traits->owns(options)) return traits;
  }
  return nullptr;
}

const OptimizerTraits& traits_of(const OptimizerOptions& options) {
  const OptimizerTraits* const traits = find_traits(options);
  require(traits != nullptr, "these options belong to no optimizer of pacer");
  return *traits;
}

}  // namespace pacer::detail

namespace pacer {

OwnRule::OwnRule(const char* name, const kernels::UpdateLoops& loops, bool has_second_moment)
    : name_(name),
      loops_(&loops),
      has_second_moment_(has_second_moment),
      traits_(std::make_shared<detail::TraitsOf<OwnRuleOptions, OwnRuleParamState>>(name)) {}

}  // namespace pacer
