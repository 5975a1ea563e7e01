#include <pacer/session/resume_together.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>

#include <pacer/checkpoints/checkpoints.h>
#include <pacer/checkpoints/detail/checkpoint_files.h>
#include <pacer/checkpoints/detail/joint_saves.h>
#include <pacer/checkpoints/detail/pending_load.h>
#include <pacer/core/error.h>

namespace pacer {
namespace detail {

class JointResume {
 public:
  explicit JointResume(const std::vector<Session*>& sessions) : sessions_(sessions) {
    check();
    for (size_t i = 0; i < sessions_.size(); ++i) sessions_[i]->start();
    for (const Checkpoints* hook : hooks_) saved_.push_back(hook->joint_steps());
  }

  std::optional<int64_t> run(const ResumeOptions& options) {
    const std::vector<int64_t> steps = steps_to_load(options.step());
    if (!steps.empty()) load(steps, options.learning_rates());
    if (steps.empty()) begin_anew();
    const auto joint = std::make_shared<JointSaves>(hooks_, /*begins_anew=*/steps.empty());
    for (Checkpoints* hook : hooks_) hook->joint_ = joint;
    return steps.empty() ? std::nullopt : std::optional(steps.back());
  }

 private:
  void check() {
    require(sessions_.size() >= 2 && std::count(sessions_.begin(), sessions_.end(), nullptr) == 0,
            "resume_together needs two Sessions or more; one goes on with session.resume()");
    const Communicator& first = sessions_[0]->parts_.world();
    for (size_t i = 0; i < sessions_.size(); ++i) {
      SessionParts& parts = sessions_[i]->parts_;
      auto* hook = parts.find<Checkpoints>();
      require(hook != nullptr, "resume_together: Session ", i,
              " of those given has no Checkpoints hook; add it with use() first");
      require(std::count(hooks_.begin(), hooks_.end(), hook) == 0, "resume_together was given Session ", i,
              " twice; name each once");
      require(!hook->joint_, "the Checkpoints in ", hook->options_.folder(),
              " belong to Sessions that resumed together before; give all Sessions of a program in one call");
      require(sessions_[i]->is_before_begin(), "resume_together belongs before the first begin of Session ",
              i);
      require(
          hook->options_.keep() >= 2, "the Checkpoints in ", hook->options_.folder(),
          " keep one checkpoint only, so that a program that dies between the saves of two Sessions would "
          "leave none that belong together; give them keep(2) or more");
      require(parts.world().rank() == first.rank() && parts.world().world_size() == first.world_size(),
              "Session ", i, " is rank ", parts.world().rank(), " of ", parts.world().world_size(),
              ", but Session 0 is rank ", first.rank(), " of ", first.world_size(),
              "; give Sessions that resume together the same ranks");
      hooks_.push_back(hook);
    }
  }

  // The step of each Session in the newest joint save, or in that with this step of the last Session; none: the
  // program begins anew.
  std::vector<int64_t> steps_to_load(std::optional<int64_t> of_last) const {
    for (const JointStep& each : saved_.back()) {
      if (each.text.empty() || (of_last && each.step != *of_last)) continue;
      std::vector<int64_t> steps;
      for (const auto& saved : saved_) {
        const auto same = std::find_if(saved.begin(), saved.end(),
                                       [&](const JointStep& other) { return other.text == each.text; });
        if (same != saved.end()) steps.push_back(same->step);
      }
      if (steps.size() == saved_.size()) return steps;
    }
    std::string found;
    bool has_any = false;
    for (size_t i = 0; i < saved_.size(); ++i) {
      found += concatenate(i == 0 ? "" : "; ", hooks_[i]->options_.folder(), " has ", names_of(saved_[i]));
      has_any = has_any || !saved_[i].empty();
    }
    require(!of_last, "the Sessions have no checkpoints that they saved together with step ",
            of_last.value_or(0), " of the last one (", found, "); take another step, or the newest");
    require(!has_any || died_in_first_save(), "the Sessions have no checkpoints that they saved together (",
            found,
            "); bring back what is missing, or go on from single ones with session.resume("
            "ResumeOptions().step(n)) of each, or remove all of them to begin anew");
    return {};
  }

  static std::string names_of(const std::vector<JointStep>& saved) {
    std::string text;
    for (const JointStep& each : saved) {
      text += concatenate(text.empty() ? "" : ", ", each.step, each.text.empty() ? " (saved alone)" : "");
    }
    return text.empty() ? "none" : "steps " + text;
  }

  // What is there is a part of the first joint save of a program, which had nothing else to go on from. It had made all folders.
  bool died_in_first_save() const {
    for (size_t i = 0; i < saved_.size(); ++i) {
      const bool is_its_first = saved_[i].size() == 1 && is_first_joint_save(saved_[i][0].text);
      if (!(saved_[i].empty() ? has_folder(i) : is_its_first)) return false;
    }
    return true;
  }

  // As rank 0 sees it.
  bool has_folder(size_t i) const {
    const bool is_there = std::filesystem::is_directory(hooks_[i]->options_.folder());
    Communicator& world = sessions_[i]->parts_.world();
    return world.world_size() == 1 ? is_there : world.exchange(is_there ? "yes" : "no").front() == "yes";
  }

  // All are read and checked before one of them is in force.
  void load(const std::vector<int64_t>& steps, ResumedRates rates) {
    std::vector<std::vector<double>> of_program;
    for (const Session* session : sessions_) of_program.push_back(session->base_rates());
    struct Loads {
      std::vector<std::unique_ptr<PendingLoad>> each;
      ~Loads() {
        while (!each.empty()) each.pop_back();  // the last first: random state goes back step by step
      }
    } loads;
    for (size_t i = 0; i < hooks_.size(); ++i) {
      loads.each.push_back(
          hooks_[i]->prepare_load([&] { return find_step(hooks_[i]->options_.folder(), steps[i]); }));
    }
    for (size_t i = 0; i < hooks_.size(); ++i) {
      hooks_[i]->commit_load(*loads.each[i]);
      for (const JointStep& each : saved_[i]) {
        if (each.step == steps[i]) hooks_[i]->saved_text_ = each.text;
      }
    }
    for (size_t i = 0; i < sessions_.size(); ++i) sessions_[i]->settle_rates(of_program[i], rates);
  }

  void begin_anew() {
    std::string folders;
    for (size_t i = 0; i < hooks_.size(); ++i) {
      if (!saved_[i].empty()) hooks_[i]->folder_is_checked_ = true;  // what is there is no run's past
      folders += concatenate(i == 0 ? "" : ", ", hooks_[i]->options_.folder());
    }
    if (!sessions_[0]->parts_.is_first_rank()) return;
    std::fprintf(stderr, "pacer: there are no checkpoints that belong together in %s; all begin at step 0\n",
                 folders.c_str());
  }

  const std::vector<Session*>& sessions_;
  std::vector<Checkpoints*> hooks_;
  std::vector<std::vector<JointStep>> saved_;  // of each Session, newest first
};

}  // namespace detail

std::optional<int64_t> resume_together(const std::vector<Session*>& sessions, const ResumeOptions& options) {
  return detail::JointResume(sessions).run(options);
}

}  // namespace pacer
