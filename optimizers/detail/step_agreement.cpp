#include <pacer/optimizers/detail/step_agreement.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include <ATen/ops/zeros.h>

#include <pacer/collectives/communicator.h>
#include <pacer/collectives/launch_environment.h>
#include <pacer/core/error.h>
#include <pacer/files/checksum.h>

namespace pacer::detail {
namespace {

template <class F>
void for_each_parameter(const ParamGroups& groups, const F& f) {
  for (const auto& group : groups) {
    for (const at::Tensor& parameter : group.params()) f(parameter);
  }
}

// A byte for each parameter: whether it has a gradient that counts.
at::Tensor gradients_of(const ParamGroups& groups) {
  std::vector<uint8_t> has;
  for_each_parameter(groups, [&](const at::Tensor& parameter) {
    has.push_back(parameter.requires_grad() && parameter.grad().defined());
  });
  const at::Tensor bytes = at::zeros({static_cast<int64_t>(has.size())}, at::kByte);
  std::copy(has.begin(), has.end(), bytes.mutable_data_ptr<uint8_t>());
  return bytes;
}

void visit_numbers(const OptimizerView& optimizer, NumberVisitor& visit) {
  for (size_t g = 0; g < optimizer.groups.size(); ++g) {
    visit.begin_group(g);
    optimizer.traits.visit_numbers(optimizer.groups[g].options(), visit);
  }
}

// The first 64 bits of a checksum.
int64_t number_of(const std::string& checksum) {
  return static_cast<int64_t>(std::stoull(checksum.substr(0, 16), nullptr, 16));
}

std::string text_of(const std::vector<Fact>& facts) {
  std::string text;
  for (const Fact& fact : facts) text += fact.what + '\0' + fact.value + '\0';
  return text;
}

std::string checksum_of_values(const at::Tensor& parameter) {
  const at::Tensor host = parameter.detach().cpu().contiguous();
  return Checksum().add(host.const_data_ptr(), host.nbytes()).hex();
}

}  // namespace

std::shared_ptr<Communicator> alone(const char* optimizer, at::Device device) {
  constexpr const char* kAdvice =
      ", but the optimizer was given no Communicator, so each rank would train a model of its own; pass one "
      "behind the options, made with Communicator::from_environment(), or Communicator::alone(device) where "
      "that is meant";
  require(!Communicator::joins_processes(), optimizer,
          ": this process has a Communicator that joins several ranks", kAdvice);
  LaunchEnvironment launch;
  try {
    launch = read_launch_environment();
  } catch (const InvalidArgument&) {
    // Whoever wants to join ranks will hear of it.
  }
  require(launch.world_size == 1, optimizer, ": ", launch.launcher, " started ", launch.world_size, " ranks",
          kAdvice);
  return Communicator::alone(device);
}

void require_same_ranks(const char* optimizer, const Communicator& own, const Communicator& of_session) {
  require(of_session.world_size() == own.world_size() && of_session.rank() == own.rank(), optimizer,
          " was given a Communicator of ", own.world_size(), " ranks, and the Session one of ",
          of_session.world_size(), "; give both the same");
}

void require_joined_on(at::Device parameters, const char* optimizer, const Communicator& ranks) {
  require(ranks.device() == parameters, optimizer, ": the parameters are on ", parameters.str(), ", but ",
          ranks.backend_name(), " joins the ranks on ", ranks.device().str(), "; move the model there first");
}

bool StepAgreement::is_known(const OptimizerView& optimizer) const {
  const auto is_same = [](const Known& before, const at::Tensor& parameter, size_t group) {
    return before.parameter.is(parameter) && before.group == group &&
           before.dtype == parameter.scalar_type() && parameter.sizes() == at::IntArrayRef(before.sizes) &&
           parameter.strides() == at::IntArrayRef(before.strides);
  };
  return !fingerprint_.empty() && is_list(parameters_, optimizer.groups, is_same);
}

void StepAgreement::remember(const OptimizerView& optimizer) {
  const std::vector<Known> before = std::exchange(parameters_, {});
  std::unordered_set<const void*> compared;
  for (const Known& known : before) compared.insert(known.parameter.key());
  values_.clear();
  const std::vector<RegisteredParameter> all = optimizer.parameters();
  for (const auto& [tensor, group, index, name] : all) {
    parameters_.push_back(
        {SeenParameter(tensor), group, tensor.scalar_type(), tensor.sizes().vec(), tensor.strides().vec()});
    if (compared.count(tensor.unsafeGetTensorImpl()) > 0) continue;
    values_.push_back({concatenate("values of parameter ", name,
                                   ", which have to be the same before its first step (a Session broadcasts "
                                   "those of rank 0)"),
                       concatenate("checksum ", checksum_of_values(tensor))});
  }
  facts_ = parameter_facts(all);
  fingerprint_ = checksum_of(text_of(facts_));
}

// All is compared anew next time.
void StepAgreement::forget() {
  fingerprint_.clear();
  parameters_.clear();
}

std::vector<at::Tensor> StepAgreement::without_gradient(Communicator& world, int64_t step,
                                                        const OptimizerView& optimizer) {
  if (!is_known(optimizer)) remember(optimizer);
  const at::Tensor own = gradients_of(optimizer.groups);
  const std::string of_gradients(static_cast<const char*>(own.const_data_ptr()),
                                 static_cast<size_t>(own.numel()));
  NumberBytes options;
  visit_numbers(optimizer, options);
  const at::Tensor mine = at::zeros({5}, at::kLong), of_ranks = at::zeros({world.world_size(), 5}, at::kLong);
  auto* numbers = mine.mutable_data_ptr<int64_t>();
  numbers[0] = step;
  numbers[1] = number_of(fingerprint_);
  numbers[2] = number_of(checksum_of(options.bytes()));
  numbers[3] = number_of(checksum_of(of_gradients));
  numbers[4] = values_.empty() ? 0 : number_of(checksum_of(text_of(values_)));  // 0: they were compared
  world.all_gather_host(of_ranks, mine).wait();
  const auto differs = [&](int64_t which) {
    const at::Tensor column = of_ranks.select(1, which);
    return column.min().item<int64_t>() != column.max().item<int64_t>();
  };
  if (differs(0) || differs(1) || differs(2)) {  // then this names the difference
    std::vector<Fact> all = facts_;
    NumberFacts facts;
    visit_numbers(optimizer, facts);
    for (Fact& fact : std::move(facts).facts()) all.push_back(std::move(fact));
    forget();
    require_agreement(world, step, all);
  }
  if (differs(4) && of_ranks.select(1, 4).ne(0).all().item<bool>()) {
    forget();
    require_agreement(world, step, values_);
  }
  values_.clear();
  at::Tensor any = own;
  if (differs(3)) {
    at::Tensor of_all = at::zeros({world.world_size(), own.numel()}, at::kByte);
    world.all_gather_host(of_all, own).wait();
    any = std::get<0>(of_all.max(0));
  }
  std::vector<at::Tensor> without;
  const auto* has = any.const_data_ptr<uint8_t>();
  for_each_parameter(optimizer.groups, [&](const at::Tensor& parameter) {
    if (*has++ == 0) without.push_back(parameter);
  });
  return without;
}

}  // namespace pacer::detail
