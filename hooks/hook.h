// clang-format off
// The training loop with every hook point in place. What is indented under a call of the user is what a Session does
// in it; hooks are called in the order of their slots.
//
//   Session session(model, optimizer);
//   session.use(hook)                    attach(parts)               every hook, once; conflicts are refused
//   session.resume()                     arrange()                   all hooks are known; begin does it, too
//                                        load(state)                 from the newest complete checkpoint
//
//   for (batch in loader)
//     [x, y] = session.begin(batch)      start(progress)             once: ranks compare themselves
//                                        open(progress)              once all have started: files to write to
//                                        begin(progress, batch)      data: cut, reshape, count
//                                          copy to the device
//                                        forward_begin(progress)     gates drawn, autocast on
//     loss = criterion(model(x), y)
//     session.backward(loss)             forward_end()               autocast off
//                                        scale_loss(loss)            loss scale
//                                        backward_begin(progress)
//                                          loss.backward()           gradients are reduced as they come
//                                        backward_end(progress)
//     session.step()                       the last micro-step of a window only:
//                                          gradients of dropped layers become zero (unused)
//                                        gradients_ready(progress)   gradients have arrived; learning rate
//                                          optimizer: norm, clip, update; gradients cleared
//                                        after_step(report)          validation, what follows from it,
//                                                                    metrics, then a checkpoint: save(state)
//   if (session.should_stop()) break                                 a hook has asked for the end
//   session.evaluate(f)                  evaluation_begin()          f, evaluation_end()
//   session.finish()                       an incomplete window takes its step
//                                        finish(progress)            last validation, metrics, checkpoint
//   session.print(line)                  print(line)                 at any time, until a hook has written it
//   session.record(name, value)          record(name, value)         at any time, until a hook has taken it
//
// A Pipeline's step takes the place of begin to backward: begin of all micro-batches first, then forward_begin,
// forward_end and scale_loss for each as the plan has them, backward_begin before the first backward pass,
// backward_end behind the last.
//
// With a GradientRelease gradients_ready is called before backward_begin, and the optimizer's part of the step is
// taken while backward runs.
//
// A hook implements what it needs. All decisions are functions of Progress, so that every rank takes the same.
// clang-format on
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/core/error.h>
#include <pacer/hooks/progress.h>
#include <pacer/optimizers/named_tensors.h>

namespace pacer {

class SessionParts;
class StepReport;

// When a hook has its turn; ties go by name. The order in which hooks are given to a Session never matters.
// Validation comes before what is decided by it, and both before records. Checkpoints come last, so that they
// hold what all others did in the step.
enum class Slot {
  data,
  forward,
  loss,
  reduce,
  clip,
  optimize,
  schedule,
  validate,
  decide,
  record,
  checkpoint
};

// One micro-batch on its way from the loader to the model.
struct MicroBatch {
  std::vector<at::Tensor> tensors;  // as passed to begin
  int64_t examples = 0;             // size of the first dimension of the first tensor, as passed
  int64_t tokens = 0;               // what is really trained on; see Session::begin
};

class Hook {
 public:
  virtual ~Hook() = default;

  // Key of the hook in checkpoints and messages; unique in a Session.
  virtual std::string hook_name() const = 0;
  virtual Slot slot() const = 0;
  // True: a Session takes no other hook with this slot that says so, too. With several ranks and no such hook
  // in Slot::reduce it uses a DataParallel.
  virtual bool exclusive() const { return false; }

  // Called by Session::use. Throws InvalidArgument, changing nothing, where the hook cannot work with these
  // parts. The parts outlive the hook's use.
  virtual void attach(SessionParts& /*parts*/) {}

  // Once, when all hooks are known, before a checkpoint is loaded. May throw as attach does.
  virtual void arrange() {}

  // False while a curriculum, a learning-rate warm-up or another number that a freeze depends on still moves.
  virtual bool settled(const Progress& /*progress*/) const { return true; }
  // The number of steps after which this hook keeps all learning rates at 0; nothing where there is none, or
  // where it is not known.
  virtual std::optional<int64_t> steps_until_zero() const { return std::nullopt; }
  // Parameters that get no gradient in the micro-steps progress.micro_step ... progress.micro_steps - 1.
  virtual std::vector<at::Tensor> unused(const Progress& /*progress*/) const { return {}; }

  // What must be the same on all ranks, as text: they compare it before training starts.
  virtual std::string agreement() const { return {}; }
  // Once, before the first micro-step of this run, when all hooks are known and a checkpoint was loaded. It
  // may throw as attach does, and writes to no file of the user's.
  virtual void start(const Progress& /*progress*/) {}
  // Once, behind start of all hooks: no hook refuses this run any more, so files may be emptied and begun.
  virtual void open(const Progress& /*progress*/) {}

  // Session::begin: a hook may change the batch, before it goes to the device.
  virtual void begin(const Progress& /*progress*/, MicroBatch& /*batch*/) {}
  // Right before the user's forward pass.
  virtual void forward_begin(const Progress& /*progress*/) {}
  // Behind the user's forward pass, also where that throws. All hooks have their turn, and then what the first
  // of them has thrown comes out of Session::backward, evaluate or prewarm, or of a Pipeline's step or evaluate.
  // Where the forward pass has thrown, it comes out of the next Session::begin.
  virtual void forward_end() {}
  // True: the forward pass needs what forward_begin did and forward_end takes back. The Session warns once
  // where the pass ran outside of them.
  virtual bool acts_in_forward() const { return false; }
  // Around what is evaluated, which Session::evaluate, Validation and a Pipeline's evaluate do, and around the
  // file that SaveBest writes of it; one may lie inside another. The model may be another one in between.
  virtual void evaluation_begin() {}
  virtual void evaluation_end() noexcept {}
  virtual at::Tensor scale_loss(at::Tensor loss) { return loss; }
  virtual void backward_begin(const Progress& /*progress*/) {}
  virtual void backward_end(const Progress& /*progress*/) {}
  // It takes the place of backward_end where backward threw. It may throw an error that says more.
  virtual void backward_failed() {}
  virtual void gradients_ready(const Progress& /*progress*/) {}
  // `report` has the progress after the step, and values to add to or to read.
  virtual void after_step(StepReport& /*report*/) {}
  virtual void finish(const Progress& /*progress*/) {}
  // True: what finish writes would be missing, so that a Session which ends without finish() warns.
  virtual bool needs_finish() const { return false; }

  // Session::print on rank 0. Returns true where the hook has written the line to stdout, as one does that
  // draws there; else the Session writes it.
  virtual bool print(const std::string& /*line*/) { return false; }
  // Session::record, with a tensor that holds one real number, on any device. Returns true where the hook
  // keeps it, on all ranks alike. Throws InvalidArgument, keeping nothing, for a name that cannot be.
  virtual bool record(const std::string& /*name*/, const at::Tensor& /*value*/) { return false; }
  // The learning rate of each parameter group that this hook multiplies before each step; empty where it sets
  // no rates. Session::resume compares those of the program with the checkpoint's, and may set them: a
  // hook with rates has both functions.
  virtual std::vector<double> base_rates() const { return {}; }
  virtual void set_base_rates(const std::vector<double>& /*rates*/) {
    throw Error("the hook " + hook_name() + " has base_rates, but no set_base_rates");
  }

  // Everything that a resumed run needs to go on as if it had not been interrupted. load sees exactly the
  // keys that save writes; it throws InvalidArgument for values that cannot be.
  virtual void save(NamedTensors& /*state*/) const {}
  virtual void load(const NamedTensors& /*state*/) {}
  // The part of it that is as large as the model: a tensor for each of the optimizer's parameters that has
  // one, by the parameter's name, the same on all ranks. Checkpoints hold each once, among the optimizer's
  // state.
  virtual NamedTensors parameter_state() { return {}; }
  // Checks what parameter_state returned when it was saved, before load is called; throws InvalidArgument
  // where it does not fit. What it returns puts it in force, and does not throw.
  virtual std::function<void()> prepare_parameter_state(const NamedTensors& /*state*/) {
    return [] {};
  }
};

}  // namespace pacer
