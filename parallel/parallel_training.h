// What all hooks share whose ranks train one model together: they compare what they are before anything is
// sent, start from the same values, compare in each window where they are, and keep buffers the same. How
// gradients come together is for GradientExchange and for Pipeline to say.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include <pacer/collectives/agreement.h>
#include <pacer/hooks/hook.h>

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace pacer {

// How ranks come to start with the same parameters and buffers.
enum class InitialParameters {
  broadcast,  // all ranks take over rank 0's
  check,      // they must be equal already, to the bit
};

class ParallelTraining : public Hook {
 public:
  Slot slot() const override { return Slot::reduce; }
  bool exclusive() const override { return true; }
  // Throws InvalidArgument for a Session without a Communicator, and a model on another device than its.
  void attach(SessionParts& parts) override;
  void start(const Progress& progress) override;
  void forward_begin(const Progress& progress) override;
  void forward_end() override;
  void backward_failed() override;
  void after_step(StepReport& report) override;
  void finish(const Progress& progress) override;

  // What a parameter means that no backward pass of a window has reached: false: an error that names it, with
  // any number of ranks; true: it sits the step out, and where another rank has reached it, its gradient here
  // is zero.
  bool unused_is_zero() const { return unused_is_zero_; }

 protected:
  ParallelTraining(InitialParameters initial, bool sync_buffers, bool unused_is_zero)
      : initial_(initial), syncs_buffers_(sync_buffers), unused_is_zero_(unused_is_zero) {}

  SessionParts& parts() const { return *parts_; }

  // Joins the ranks anew where other parameters are trained than when they were joined last.
  void follow_parameters(const Progress& progress);
  // The two halves of what ranks tell each other in a window: what this one is about to do, and what is known
  // of all of them then: the window's totals are of all ranks. A rank at another place is an error.
  void announce(const Progress& progress, Intent intent);
  void await_totals();
  // Waits for what was announced before a backward pass that is not the window's last.
  void await_peers();
  // Before a step: the window's totals are of all ranks, if they are not yet. Returns whether the window ends
  // early, so that none of its backward passes was announced as the last.
  bool settle_totals(const Progress& window);
  // The same already while the window's last backward runs, for SessionParts::coming_inputs.
  void learn_totals();
  // The sum over ranks of the window's loss, where it is recorded.
  Work add_losses();

  // Whether ranks were joined, as they never are in a world of one.
  bool is_joined() const { return is_joined_; }
  // Ranks have agreed and their parameters are the same; again where those that are trained have changed. Returns
  // what gradients are multiplied with before they are added: the coming value of WindowTotals::gradient_scale.
  virtual double join() = 0;
  // Whether this rank's batches count: not where another rank has the same ones.
  virtual bool counts_batches() const { return true; }

  // Where a rank has told of changes: compares parameters and their memory orders, and shares those that joined
  // since the last pass. Then gives all ranks rank 0's values of parameters that a forward pass has written to
  // on any of them, as an embedding with max_norm does. Once gradients are ready, and before the optimizer uses
  // the values.
  void share_written_parameters();
  // Whether this rank has changes to tell of: to a buffer, or to a parameter's values in a forward pass or its
  // memory order.
  bool sees_changes() const;
  // The ranks find out behind this window what forward passes write to, whether one of them has told of
  // something new or not.
  void learn_changes() { learns_changes_ = true; }

 private:
  std::vector<Fact> facts() const;
  std::vector<Fact> replica_facts() const;
  RankStatus status_of(Intent intent, const Progress& progress) const;
  void join_ranks(const Progress& progress);
  // Whether trained parameters are there whose values were never made rank 0's.
  bool has_new_parameters() const;
  void share_parameters();
  void remember_buffers(const std::shared_ptr<torch::nn::Module>& owner);
  void remember_parameters();
  std::string changed_buffers() const;
  std::string written_parameters() const;
  void sync_buffers();
  void add_totals(const std::vector<RankStatus>& ranks);

  const InitialParameters initial_;
  const bool syncs_buffers_, unused_is_zero_;
  bool is_joined_ = false;
  double scale_ = 1;  // see join()
  SessionParts* parts_ = nullptr;
  std::vector<at::Tensor> trained_;  // since ranks were joined
  // Those whose values have been rank 0's since the start, by address, which no other can take meanwhile.
  std::unordered_map<const void*, c10::weak_intrusive_ptr<c10::TensorImpl>> shared_;
  StatusExchange statuses_;    // of the pass under way
  bool knows_totals_ = false;  // of this window, from statuses that were awaited in backward
  struct Buffer {
    at::Tensor tensor;
    std::shared_ptr<torch::nn::Module> owner;
    bool is_statistic;  // by its name: kernels that write running statistics count no version
    int64_t version;    // before the first pass; goes on where evaluations write to it
    int64_t version_before_evaluation = 0;  // the outermost one under way
  };
  std::vector<Buffer> buffers_;
  std::string is_changing_;  // by buffer, '0' or '1'; the same on all ranks
  struct Parameter {
    at::Tensor tensor;
    int64_t version;               // before the pass under way
    bool is_written;               // by forward passes of this rank
    bool is_shared;                // in every step; the same on all ranks
    std::vector<int64_t> strides;  // when ranks compared them last
  };
  std::vector<Parameter> parameters_;                // since ranks were joined
  bool in_forward_ = false, in_evaluation_ = false;  // between forward_begin and forward_end
  bool learns_changes_ = false;                      // in this step
};

// Ranks whose gradients come together while backward runs, pass by pass: what DataParallel and Shards share.
class GradientExchange : public ParallelTraining {
 public:
  void backward_begin(const Progress& progress) override;
  void backward_end(const Progress& progress) override;
  void backward_failed() override;
  void gradients_ready(const Progress& window) override;

 protected:
  using ParallelTraining::ParallelTraining;

  // ---- None of these is called in a world of one rank. ----

  // Whether backward passes before a window's last one send anything, too.
  virtual bool sends_in_every_pass() const { return false; }
  virtual void begin_pass(const Progress& progress, bool is_last) = 0;
  virtual void end_pass(bool is_last) = 0;
  // Decides what becomes of parameters that no pass of the window has reached. All ranks are known to be
  // about to take this step, so they may exchange something for it.
  virtual void settle_missed(const Progress& /*window*/) {}
  // It takes the place of a last pass in a window that ends early.
  virtual void reduce(const Progress& window) = 0;
  virtual void wait() = 0;
  virtual void drop() = 0;
};

}  // namespace pacer
