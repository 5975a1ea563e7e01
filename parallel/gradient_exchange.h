// Ranks whose gradients come together while backward runs, pass by pass: what DataParallel and Shards share.
#pragma once

#include <pacer/parallel/parallel_training.h>

namespace pacer {

class GradientExchange : public ParallelTraining {
 public:
  void backward_begin(const Progress& progress) override;
  void backward_end(const Progress& progress) override;
  void backward_failed() override;
  void gradients_ready(const Progress& window) override;

 protected:
  GradientExchange(InitialParameters initial, bool sync_buffers) : ParallelTraining(initial, sync_buffers) {}

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
