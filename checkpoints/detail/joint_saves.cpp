#include <pacer/checkpoints/detail/joint_saves.h>

#include <algorithm>
#include <cstdio>

#include <pacer/checkpoints/checkpoints.h>
#include <pacer/checkpoints/detail/checkpoint_files.h>
#include <pacer/collectives/communicator.h>
#include <pacer/core/error.h>
#include <pacer/files/checkpoint_folder.h>
#include <pacer/hooks/session_parts.h>

namespace pacer::detail {
namespace {

std::string read_joint_text(const CheckpointInfo& checkpoint, const CheckpointManifest& manifest) {
  const CheckpointFile* file = find_file(manifest, kJointFile);
  if (file == nullptr) return "";
  std::vector<char> bytes;
  if (file->size <= kMaxJointBytes) {
    const std::vector<std::string> names{kJointFile};
    bytes = open_checkpoint(checkpoint.folder, names).files.at(kJointFile);
  }
  return parse_joint_text(bytes, concatenate(checkpoint.folder, '/', kJointFile));
}

}  // namespace

std::vector<JointStep> list_joint_steps(const std::string& root) {
  std::vector<JointStep> steps;
  for (const auto& [checkpoint, manifest] : verified_checkpoints(root)) {
    steps.push_back({checkpoint.step, read_joint_text(checkpoint, manifest)});
  }
  require<FileError>(
      !steps.empty() || list_checkpoints(root).empty(), "none of the checkpoints in ", root,
      " can be read; repair one, or remove them all, with those of the other Sessions, to begin anew");
  return steps;
}

void JointSaves::after_step(const Checkpoints& hook, bool is_due, bool stands_still) {
  is_due_ = is_due_ || is_due;
  stands_still_ = stands_still_ || stands_still;
  if (is_due_) require_complete();
  const bool is_end_of_round = is_complete_ && &hook == hooks_.back();
  if (!is_end_of_round || !is_due_ || is_in_window()) return;
  complete_all();
  if (behind().size() <= 1) save(stands_still_);
}

void JointSaves::save_now() {
  complete_all();
  if (is_saved()) return;
  require_complete();
  const std::vector<Checkpoints*> waiting = behind();
  require(waiting.size() <= 1, "the Sessions whose checkpoints are in ",
          waiting.empty() ? "" : waiting.front()->options_.folder(), " and ",
          waiting.empty() ? "" : waiting.back()->options_.folder(),
          " have taken no step since they were saved together; save once at most one of the Sessions has "
          "taken none");
  save(/*stands_still=*/true);
}

void JointSaves::finish(const Checkpoints& hook) {
  finished_.insert(&hook);
  const auto has_finished = [&](const Checkpoints* each) { return finished_.count(each) > 0; };
  if (!std::all_of(hooks_.begin(), hooks_.end(), has_finished)) return;
  complete_all();
  if (!is_saved()) require_complete();
  const auto has_stepped = [](const Checkpoints* each) { return each->parts_->progress.step > 0; };
  if (std::any_of(hooks_.begin(), hooks_.end(), has_stepped) && !is_saved()) {
    if (behind().size() <= 1) {
      save(/*stands_still=*/true);
    } else if (hook.parts_->is_first_rank()) {
      std::fprintf(
          stderr,
          "pacer: the last steps are not saved, because %zu Sessions have taken none since all were saved "
          "together; those checkpoints stay the newest\n",
          behind().size());
    }
  }
  for (Checkpoints* each : hooks_) each->unlock();
}

void JointSaves::remove(const Checkpoints& hook) {
  is_complete_ = false;
  hooks_.erase(std::remove(hooks_.begin(), hooks_.end(), &hook), hooks_.end());
  finished_.erase(&hook);
}

void JointSaves::require_complete() const {
  require(is_complete_,
          "a Session whose checkpoints belong to those of this one is gone; keep all Sessions that resumed "
          "together until each has called finish()");
}

bool JointSaves::is_in_window() const {
  return std::any_of(hooks_.begin(), hooks_.end(),
                     [](const Checkpoints* each) { return each->parts_->progress.micro_step != 0; });
}

// Everything as it is now is in checkpoints that belong together.
bool JointSaves::is_saved() const {
  const std::string& text = hooks_.front()->saved_text_;
  return std::all_of(hooks_.begin(), hooks_.end(), [&](const Checkpoints* each) {
    return !text.empty() && each->saved_text_ == text && each->saved_step_ == each->parts_->progress.step;
  });
}

// Those that have a checkpoint of the step at which they are.
std::vector<Checkpoints*> JointSaves::behind() const {
  std::vector<Checkpoints*> hooks;
  for (Checkpoints* each : hooks_) {
    if (each->saved_step_ == each->parts_->progress.step) hooks.push_back(each);
  }
  return hooks;
}

// The newest save whose parameters are finite in all Sessions stays in all of them, as the newest finite one of a Session
// that saves alone does.
void JointSaves::complete_all() {
  for (Checkpoints* each : hooks_) each->complete_save();
  const std::string& text = hooks_.front()->saved_text_;
  const bool is_finite = std::all_of(hooks_.begin(), hooks_.end(), [&](const Checkpoints* each) {
    return !text.empty() && each->saved_text_ == text && each->saved_is_finite_;
  });
  if (!is_finite) return;
  for (Checkpoints* each : hooks_) each->stays_ = each->saved_step_;
}

// Behind complete_all, and where at most one is behind().
void JointSaves::save(bool stands_still) {
  for (Checkpoints* each : hooks_) {
    require(each->parts_->progress.micro_step == 0, "the Session whose checkpoints are in ",
            each->options_.folder(),
            " is inside an accumulation window where all are saved together; end its window before the last "
            "Session's step");
  }
  const std::vector<Checkpoints*> last = behind();
  const std::string text = new_joint_text(!saved_any_);
  for (Checkpoints* each : hooks_) {
    if (std::count(last.begin(), last.end(), each) == 0) each->begin_save(text);
  }
  for (Checkpoints* each : hooks_) {
    if (stands_still || !last.empty()) each->complete_save();
  }
  if (last.empty() || !would_replace_finite(*last.front())) {
    for (Checkpoints* each : last) {
      each->begin_save(text);
      if (stands_still) each->complete_save();
    }
    saved_any_ = true;
  }
  is_due_ = stands_still_ = false;
}

// The one that is behind() holds the newest moment at which all were finite, and one of the others, which have been written, is
// not finite any more. What is there stays.
bool JointSaves::would_replace_finite(const Checkpoints& behind) const {
  const auto is_finite = [&](const Checkpoints* each) { return each == &behind || each->saved_is_finite_; };
  const bool are_finite = std::all_of(hooks_.begin(), hooks_.end(), is_finite);
  bool would = !are_finite && behind.stays_ == behind.saved_step_;  // as rank 0 sees it
  Communicator& world = behind.parts_->world();
  if (world.world_size() > 1) would = world.exchange(would ? "yes" : "no").front() == "yes";
  if (!would) return false;
  if (behind.parts_->is_first_rank()) {
    std::fprintf(stderr,
                 "pacer: parameters of another Session are not finite, so the checkpoint of step %lld in %s "
                 "stays: it is of the newest moment at which all were\n",
                 static_cast<long long>(behind.saved_step_), behind.options_.folder().c_str());
  }
  return true;
}

}  // namespace pacer::detail
