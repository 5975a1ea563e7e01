// F1: a run in which one rank is killed or stopped at a chosen point, and its resumption. The run prints the
// hash of its last state, which must be that of a run without faults.
#include <csignal>
#include <cstdlib>

#include <unistd.h>

#include <pacer/core/checksum.h>

#include "faulty_transport.h"
#include "optimizers.h"
#include "scenario.h"

namespace pacer::testing {
namespace {

// Ends or stops this process, as the arguments say: signal=KILL or STOP.
void suffer(const Player& player) {
  say("fault");
  raise(player.text("signal") == "KILL" ? SIGKILL : SIGSTOP);
}

// Points in the Session's step and in checkpoints: a hook that suffers there.
class FaultHook : public Hook {
 public:
  FaultHook(std::string point, std::function<void()> fault)
      : point_(std::move(point)), fault_(std::move(fault)) {}
  std::string hook_name() const override { return "fault"; }
  Slot slot() const override { return Slot::schedule; }
  void attach(SessionParts& parts) override { parts_ = &parts; }
  void backward_begin(const Progress& p) override { at("backward", p.step); }
  void backward_end(const Progress& p) override { at("after_backward", p.step); }
  void gradients_ready(const Progress& p) override { at("before_kernel", p.step); }
  void after_step(StepReport& r) override { at("after_kernel", r.progress().step - 1); }
  void save(NamedTensors&) const override { at("in_save", parts_->progress.step - 1); }
  void load(const NamedTensors&) override {
    if (point_ == "in_load") fault_();
  }

 private:
  void at(const char* point, int64_t step) const {
    if (point_ == point && step == 3) fault_();
  }
  std::string point_;
  std::function<void()> fault_;
  SessionParts* parts_ = nullptr;
};

void play(const Player& player) {
  // The point: NAME, or data:N, data:N:inside, control:N, control:N:inside (operations of the transports of
  // all communicators of this rank), or all_to_all:N, all_gather:N (those of the transports of data).
  const bool culprit = player.has("culprit") && player.number("culprit") == player.rank;
  const std::string point = culprit ? player.text("point") : "";
  const auto fault = [&player] { suffer(player); };
  if (point == "rendezvous") fault();
  auto connection = player.connect();
  const auto operations = std::make_shared<int>(0);
  const auto wrap = [=](std::shared_ptr<detail::Transport>& transport, const std::string& name,
                        const std::string& only = "") {
    if (point.compare(0, name.size(), name) != 0) return;
    const bool inside = point.find("inside") != std::string::npos;
    transport = std::make_shared<FaultyTransport>(transport, only, std::atoi(point.c_str() + name.size()),
                                                  inside, fault, operations);
  };
  const auto wrap_all = [=](detail::Connection& of_group) {
    wrap(of_group.data, "data:");
    wrap(of_group.control, "control:");
    wrap(of_group.data, "all_to_all:", "all_to_all");
    wrap(of_group.data, "all_gather:", "all_gather");
  };
  wrap_all(connection);
  connection.join = [wrap_all, join = connection.join](const detail::GroupPlan& plan) {
    detail::Connection group = join(plan);
    if (!plan.members.empty()) wrap_all(group);
    return group;
  };
  const auto world = std::make_shared<Communicator>(std::move(connection), player.options());
  if (point == "after_rendezvous") fault();

  std::vector<RegisteredHook> hooks;
  for (const RegisteredHook& hook : all_hooks()) {
    if (hook.name == "accumulation" || hook.name == "clipping" || hook.name == "sampler")
      hooks.push_back(hook);
  }
  const RegisteredOptimizer optimizer =
      optimizer_named(player.has("optimizer") ? player.text("optimizer") : "FusedAdamW");
  SmallRun run(optimizer, hooks, /*dropout=*/0.1, world);
  if (player.has("shards")) {
    const bool by_nodes = player.options().ranks_per_node() > 0;
    const auto options = ShardsOptions().over(by_nodes ? ShardGroup::node : ShardGroup::world);
    run.session->use(player.text("shards") == "parameters" ? Shards(run.model->stack, options)
                                                           : Shards(ShardsOptions(options).unit_bytes(600)));
  } else {
    run.session->use(DataParallel(DataParallelOptions().bucket_bytes(600).first_bucket_bytes(100)));
  }
  run.session->use(FaultHook(point, fault))
      .use(Checkpoints(
          CheckpointsOptions(player.text("folder")).every(2).timeout(player.options().timeout())));
  const auto resumed = run.resume();
  say("resumed " + std::to_string(resumed.value_or(0)));
  while (run.session->progress().step < 6) run.step();
  run.finish();
  Checksum sum;
  const auto whole = run.session->whole_parameters();
  const auto state = run.state();
  for (const auto& item : state.model) {
    const Tensor tensor = item.second.cpu();
    sum.add(tensor.const_data_ptr(), static_cast<size_t>(tensor.numel()) * tensor.element_size());
  }
  say("hash " + sum.hex());
}

const AddScenario kFaults("faults", play);

}  // namespace
}  // namespace pacer::testing
