// What tests of Sessions that save and go on together do with folders, and three Sessions for them.
#pragma once

#include <array>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <torch/nn/modules/linear.h>

#include "support/checkpoints/stored_checkpoints.h"
#include "support/session/small_gan.h"

namespace pacer::testing {

inline std::string folder_of(const std::string& run, const char* network, int64_t step) {
  char name[40];
  std::snprintf(name, sizeof name, "/step-%010lld", static_cast<long long>(step));
  return run + "/" + network + name;
}

inline void run_command(const std::string& command) {
  if (std::system(command.c_str()) != 0) throw std::runtime_error("failed: " + command);
}
inline void remove_folder(const std::string& folder) { run_command("rm -r " + folder); }
inline void copy_folder(const std::string& from, const std::string& to) {
  run_command("cp -r " + from + " " + to);
}

inline std::optional<int64_t> resume_quietly(SmallGan& gan) {
  const CapturedStderr quiet;
  return gan.resume();
}

// The Checkpoints of a Session, which has them behind all other hooks.
inline Checkpoints& checkpoints_of(const Session& session) {
  return dynamic_cast<Checkpoints&>(*session.hooks().back());
}

// Three Sessions that are due after each step; the last one's network is as wide as asked.
class ThreeSessions {
 public:
  explicit ThreeSessions(std::string folder, int64_t width_of_last = 2) : folder_(std::move(folder)) {
    for (size_t i = 0; i < 3; ++i) {
      models_[i] = torch::nn::Linear(3, i == 2 ? width_of_last : 2);
      optimizers_[i] = std::make_unique<FusedAdam>(models_[i]->parameters(), FusedAdamOptions(0.01));
      sessions_[i] = std::make_unique<Session>(models_[i], *optimizers_[i]);
      sessions_[i]->use(Checkpoints(CheckpointsOptions(folder_of_session(i)).every(1)));
      all.push_back(sessions_[i].get());
    }
  }
  std::string folder_of_session(size_t i) const { return folder_ + "/" + std::to_string(i); }
  std::vector<int64_t> steps_of(size_t i) const { return stored_steps(folder_of_session(i)); }
  void step(size_t i) {
    auto [x] = all[i]->begin(torch::randn({4, 3}));
    all[i]->backward(models_[i]->forward(x).square().mean());
    all[i]->step();
  }
  void round() {
    for (size_t i = 0; i < 3; ++i) step(i);
  }
  // Its parameters, and so all its next ones, are not finite from here on.
  void spoil(size_t i) {
    const at::NoGradGuard no_grad;
    models_[i]->weight.fill_(std::numeric_limits<float>::quiet_NaN());
  }
  void freeze(size_t i, bool is_frozen) {
    for (Tensor& parameter : models_[i]->parameters()) parameter.requires_grad_(!is_frozen);
  }
  void finish() {
    for (Session* session : all) session->finish();
  }
  std::vector<Session*> all;

 private:
  std::string folder_;
  std::array<torch::nn::Linear, 3> models_{nullptr, nullptr, nullptr};
  std::array<std::unique_ptr<FusedAdam>, 3> optimizers_;
  std::array<std::unique_ptr<Session>, 3> sessions_;
};

}  // namespace pacer::testing
