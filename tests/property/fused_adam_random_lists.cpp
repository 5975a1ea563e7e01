// Random programs: lists of parameters of any dtype, shape and layout in random groups, and between the steps
// whatever a user may do. After every step each parameter must be where torch's optimizer, fed the same, has
// it. Every round is a function of its seed, which a failure prints.
#include "support/catch.h"

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <random>

#include "support/checkpoints/archives.h"
#include "support/optimizers/optimizers.h"

namespace pacer::testing {
namespace {

template <class Fused>
class RandomProgram {
 public:
  explicit RandomProgram(uint64_t seed) : random_(seed) {
    torch::manual_seed(seed);
    finite_check_ = chance(0.3);
    const int64_t group_count = upto(3) + 1;
    for (int64_t g = 0; g < group_count; ++g) new_group();
    ours_.emplace(groups_of<Fused>());
    theirs_.emplace(groups_of<Peer>());
  }

  // Empty if all went well, else what differs.
  std::string run() {
    const int64_t steps = upto(8) + 2;
    for (int64_t step = 0; step < steps; ++step) {
      if (chance(0.6)) act();
      set_gradients();
      if (finite_check_ && chance(0.2)) {
        if (const std::string wrong = skipped_step(); !wrong.empty()) return wrong;
      }
      ours_->step();
      theirs_->step();
      if (const std::string wrong = compare(); !wrong.empty())
        return wrong + " after step " + std::to_string(step) + log_;
    }
    return "";
  }

 private:
  using Peer = PeerOf<Fused>;
  struct Member {
    Tensor ours, theirs;  // 16-bit parameters have an fp32 twin
  };
  struct GroupOptions {
    double lr, beta1, beta2, eps, weight_decay;
    bool amsgrad;
  };

  int64_t upto(int64_t count) {
    return count <= 0 ? 0 : static_cast<int64_t>(random_() % static_cast<uint64_t>(count));
  }
  bool chance(double probability) { return static_cast<double>(random_() >> 11) * 0x1p-53 < probability; }
  double one_of(std::initializer_list<double> values) {
    return values.begin()[upto(static_cast<int64_t>(values.size()))];
  }

  Tensor random_layout(std::vector<int64_t> shape, at::ScalarType dtype) {
    Tensor tensor;
    const int64_t kind = upto(5);
    if (kind == 0 && shape.size() >= 2) {  // permuted
      std::vector<int64_t> order(shape.size());
      for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i);
      std::shuffle(order.begin(), order.end(), random_);
      std::vector<int64_t> permuted(shape.size()), back(shape.size());
      for (size_t i = 0; i < order.size(); ++i) {
        permuted[i] = shape[static_cast<size_t>(order[i])];
        back[static_cast<size_t>(order[i])] = static_cast<int64_t>(i);
      }
      return torch::randn(permuted, at::kDouble).to(dtype).permute(back).detach();
    }
    if (kind == 1 && !shape.empty()) {  // gaps
      auto wide = shape;
      wide.back() *= 2;
      return torch::randn(wide, at::kDouble).to(dtype).slice(-1, 0, wide.back(), 2).detach();
    }
    if (kind == 2) {  // not aligned
      int64_t count = 1;
      for (const int64_t size : shape) count *= size;
      return torch::randn({count + 1}, at::kDouble).to(dtype).slice(0, 1).view(shape).detach();
    }
    return torch::randn(shape, at::kDouble).to(dtype);
  }

  Member new_member() {
    std::vector<int64_t> shape(static_cast<size_t>(upto(4)));
    for (int64_t& size : shape) size = chance(0.07) ? 0 : chance(0.1) ? upto(60) + 1 : upto(6) + 1;
    if (chance(0.01)) shape = {33000 + upto(3)};
    const at::ScalarType dtypes[] = {at::kDouble, at::kDouble,   at::kFloat,
                                     at::kFloat,  at::kBFloat16, at::kHalf};
    const at::ScalarType dtype = dtypes[upto(6)];
    const Tensor ours = random_layout(shape, dtype).requires_grad_();
    const at::ScalarType twin = dtype == at::kDouble ? at::kDouble : at::kFloat;
    return {ours, ours.detach().to(twin).clone(at::MemoryFormat::Contiguous).requires_grad_()};
  }

  size_t new_group() {
    options_.push_back({one_of({0.0, 1e-3, 0.01, 0.05}), one_of({0.0, 0.5, 0.9}), one_of({0.5, 0.9, 0.999}),
                        one_of({1e-8, 1e-3}), one_of({0.0, 0.0, 0.1}), chance(0.4)});
    members_.emplace_back();
    for (int64_t i = upto(7); i > 0; --i) members_.back().push_back(new_member());
    return members_.size() - 1;
  }

  template <class Optimizer>
  torch::optim::OptimizerParamGroup group_of(size_t g) const {
    std::vector<Tensor> parameters;
    for (const Member& member : members_[g])
      parameters.push_back(kIsFused<Optimizer> ? member.ours : member.theirs);
    const GroupOptions& o = options_[g];
    auto options =
        OptionsOf<Optimizer>(o.lr).betas({o.beta1, o.beta2}).eps(o.eps).weight_decay(o.weight_decay);
    options.amsgrad(o.amsgrad);
    if constexpr (kIsFused<Optimizer>) options.finite_check(finite_check_);
    return {parameters, std::make_unique<OptionsOf<Optimizer>>(options)};
  }
  template <class Optimizer>
  std::vector<torch::optim::OptimizerParamGroup> groups_of() const {
    std::vector<torch::optim::OptimizerParamGroup> groups;
    for (size_t g = 0; g < members_.size(); ++g) groups.push_back(group_of<Optimizer>(g));
    return groups;
  }

  void set_gradients() {
    const double missing = one_of({0.0, 0.1, 0.5});
    for (auto& group : members_) {
      for (Member& member : group) {
        member.ours.mutable_grad() = member.theirs.mutable_grad() = Tensor();
        if (chance(missing)) continue;
        Tensor gradient = random_layout(member.ours.sizes().vec(), member.ours.scalar_type());
        if (chance(0.1)) gradient.zero_();
        if (chance(0.1) && gradient.dim() > 0) gradient = gradient.slice(0, 0, 1).expand_as(gradient);
        member.ours.mutable_grad() = gradient;
        member.theirs.mutable_grad() = gradient.to(member.theirs.scalar_type());
      }
    }
  }

  // A step with one bad element; torch's side does not take it.
  std::string skipped_step() {
    std::vector<Tensor> with_gradient;
    for (auto& group : members_) {
      for (Member& member : group) {
        if (member.ours.grad().defined() && member.ours.numel() > 0) with_gradient.push_back(member.ours);
      }
    }
    if (with_gradient.empty()) return "";
    const Tensor victim =
        with_gradient[static_cast<size_t>(upto(static_cast<int64_t>(with_gradient.size())))];
    const Tensor good = victim.grad();
    const Tensor flat = good.contiguous().view({-1}).clone();
    flat[upto(flat.numel())] = one_of({HUGE_VAL, -HUGE_VAL, NAN});
    victim.mutable_grad() = flat.view(good.sizes());
    const int64_t before = ours_->skipped_steps();
    ours_->step();
    victim.mutable_grad() = good;
    if (ours_->skipped_steps() != before + 1) return "a bad step was not skipped";
    return compare();
  }

  // One of the things users do between two steps.
  void act() {
    const int64_t action = upto(9);
    log_ += ", " + std::to_string(action);
    Member* member = nullptr;
    size_t g = static_cast<size_t>(upto(static_cast<int64_t>(members_.size())));
    if (!members_[g].empty())
      member = &members_[g][static_cast<size_t>(upto(static_cast<int64_t>(members_[g].size())))];
    switch (action) {
      case 0: {  // a schedule
        options_[g].lr = one_of({0.0, 0.02, 0.05});
        ours_->param_groups()[g].options().set_lr(options_[g].lr);
        theirs_->param_groups()[g].options().set_lr(options_[g].lr);
        return;
      }
      case 1: {  // saved, and resumed in a fresh optimizer
        const std::string archive = saved(*ours_);
        ours_.emplace(groups_of<Fused>());
        load_from(*ours_, archive);
        return;
      }
      case 2: {
        g = new_group();
        ours_->add_param_group(group_of<Fused>(g));
        theirs_->add_param_group(group_of<Peer>(g));
        return;
      }
      case 3: {
        members_[g].push_back(new_member());
        ours_->param_groups()[g].params().push_back(members_[g].back().ours);
        theirs_->param_groups()[g].params().push_back(members_[g].back().theirs);
        return;
      }
      case 4: {
        Fused moved(std::move(*ours_));
        ours_.emplace(std::move(moved));
        return;
      }
      case 5: {  // a step count set by hand
        if (member == nullptr || ours_->state().count(member->ours.unsafeGetTensorImpl()) == 0) return;
        const int64_t steps = upto(50);
        state_of(*ours_, member->ours).step(steps);
        state_of(*theirs_, member->theirs).step(steps);
        return;
      }
      case 6: {  // new weights, in place
        if (member == nullptr) return;
        torch::NoGradGuard no_grad;
        member->ours.copy_(torch::randn(member->ours.sizes(), at::kDouble));
        member->theirs.copy_(member->ours);
        return;
      }
      case 7: {  // new weights in new memory
        if (member == nullptr) return;
        member->ours.set_data(random_layout(member->ours.sizes().vec(), member->ours.scalar_type()));
        torch::NoGradGuard no_grad;
        member->theirs.copy_(member->ours);
        return;
      }
      default: {  // state dropped
        if (member == nullptr) return;
        ours_->state().erase(member->ours.unsafeGetTensorImpl());
        theirs_->state().erase(member->theirs.unsafeGetTensorImpl());
        if (member->ours.scalar_type() == member->theirs.scalar_type()) return;
        torch::NoGradGuard no_grad;  // and with it the digits below the 16 bits
        member->theirs.copy_(member->ours);
      }
    }
  }

  std::string compare() {
    for (size_t g = 0; g < members_.size(); ++g) {
      for (size_t i = 0; i < members_[g].size(); ++i) {
        const Member& member = members_[g][i];
        const std::string where = std::to_string(g) + "." + std::to_string(i);
        const at::ScalarType dtype = member.ours.scalar_type();
        // In units of the parameter's size plus one: rounding of fp32 or fp64 in both, and of the 16-bit
        // value. A remainder keeps its low bits when new weights come in, which is up to one more half unit
        // of bf16.
        const double allowed = dtype == at::kDouble  ? 1e-13
                               : dtype == at::kFloat ? 1e-5
                               : dtype == at::kHalf  ? 0x1p-10
                                                     : 0x1p-7;
        const double size =
            member.theirs.numel() == 0 ? 0 : member.theirs.abs().max().template item<double>();
        const double apart = distance(member.ours, member.theirs) / (1 + size);
        if (!(apart <= allowed))
          return "value of " + where + " is off by " + std::to_string(apart / allowed) + " x the bound";
        const auto mine = ours_->state().find(member.ours.unsafeGetTensorImpl());
        const auto other = theirs_->state().find(member.theirs.unsafeGetTensorImpl());
        const bool stepped = other != theirs_->state().end();
        const int64_t steps = mine == ours_->state().end() ? 0 : state_of(*ours_, member.ours).step();
        if (steps != (stepped ? state_of(*theirs_, member.theirs).step() : 0))
          return "step count of " + where;
      }
    }
    return "";
  }

  std::mt19937_64 random_;
  bool finite_check_;
  std::vector<std::vector<Member>> members_;  // by group
  std::vector<GroupOptions> options_;
  std::optional<Fused> ours_;
  std::optional<Peer> theirs_;
  std::string log_ = "; actions";
};

template <class Fused>
void check_random_programs(uint64_t first_seed) {
  const char* const longer = std::getenv("PACER_TEST_LONG");
  const uint64_t rounds = longer != nullptr && longer[0] != '\0' ? 10000 : 400;
  for (uint64_t seed = first_seed; seed < first_seed + rounds; ++seed) {
    const std::string wrong = RandomProgram<Fused>(seed).run();
    if (wrong.empty()) continue;
    CAPTURE(seed);
    CHECK(wrong == "");
  }
  SUCCEED();
}

TEST_CASE("N5: random programs leave FusedAdam where torch's Adam is", "[fused_adam]") {
  check_random_programs<FusedAdam>(1);
}

TEST_CASE("N5: random programs leave FusedAdamW where torch's AdamW is", "[fused_adam]") {
  check_random_programs<FusedAdamW>(100001);
}

}  // namespace
}  // namespace pacer::testing
