// Checkpoints of several Sessions of one program that are saved at the same moment, so that the Sessions can go on
// together from what all of them have (session/resume_together.h). The moment is the end of a step of the last
// one; whichever is due, all save. Each of the checkpoints holds the same text, by which they are found again.
//
// Wherever the program dies, all of the newest joint save or all of the one before it are on the disk: a save
// begins once the one before is complete, and a checkpoint that takes the place of one of the same step is written
// behind all others.
#pragma once

#include <set>
#include <string>
#include <utility>
#include <vector>

#include <pacer/checkpoints/detail/joint_steps.h>

namespace pacer {

class Checkpoints;

namespace detail {

// Those of Checkpoints::saved_steps, newest first. For rank 0. Says on stderr what it passed over.
std::vector<JointStep> list_joint_steps(const std::string& root);

class JointSaves {
 public:
  // In the order in which the loop steps the Sessions. `begins_anew`: none of them has resumed.
  JointSaves(std::vector<Checkpoints*> hooks, bool begins_anew)
      : hooks_(std::move(hooks)), saved_any_(!begins_anew) {}

  // A step of the Session of that hook has ended. is_due: it is time to save; stands_still: and to wait until all
  // checkpoints are complete. Saves at the end of a step of the last Session.
  void after_step(const Checkpoints& hook, bool is_due, bool stands_still);
  // Saves now and waits. Throws InvalidArgument where it cannot: two Sessions, say, have taken no step since the last
  // joint save, so that both would have to write over what that one needs.
  void save_now();
  // The Session of that hook has ended its training. With the last of them what is not saved is saved.
  void finish(const Checkpoints& hook);
  // The hook is destroyed.
  void remove(const Checkpoints& hook);

 private:
  bool is_saved() const;
  std::vector<Checkpoints*> behind() const;
  void require_complete() const;  // throws InvalidArgument where a hook was destroyed
  bool is_in_window() const;
  bool would_replace_finite(const Checkpoints& behind) const;
  void complete_all();
  void save(bool stands_still);

  std::vector<Checkpoints*> hooks_;
  std::set<const Checkpoints*> finished_;
  bool saved_any_;
  bool is_due_ = false, stands_still_ = false;
  bool is_complete_ = true;  // no hook was destroyed
};

}  // namespace detail
}  // namespace pacer
