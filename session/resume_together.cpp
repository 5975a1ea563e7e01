#include <pacer/session/resume_together.h>

#include <algorithm>
#include <string>

#include <pacer/core/error.h>

namespace pacer {
namespace {

std::string text_of(const std::vector<int64_t>& steps) {
  std::string text;
  for (const int64_t step : steps) text += (text.empty() ? "" : ", ") + std::to_string(step);
  return text.empty() ? "no step" : text;
}

}  // namespace

std::optional<int64_t> resume_together(const std::vector<Session*>& sessions) {
  require(sessions.size() >= 2 && std::count(sessions.begin(), sessions.end(), nullptr) == 0,
          "resume_together needs two Sessions or more; one goes on with session.resume()");
  std::vector<int64_t> common;  // newest first
  std::string found;
  bool has_any = false;
  for (Session* session : sessions) {
    const std::vector<int64_t> steps = session->saved_steps();
    has_any = has_any || !steps.empty();
    found += (found.empty() ? "" : "; ") + text_of(steps);
    if (session == sessions.front()) common = steps;
    const auto is_missing = [&](int64_t step) { return std::count(steps.begin(), steps.end(), step) == 0; };
    common.erase(std::remove_if(common.begin(), common.end(), is_missing), common.end());
  }
  require(!has_any || !common.empty(),
          "the Sessions have no checkpoint of the same step (they have those of ", found,
          "); give their Checkpoints the same every and keep(3) or more, and to begin anew remove those that "
          "there are");
  if (common.empty()) return std::nullopt;
  for (Session* session : sessions) session->resume(ResumeOptions().step(common.front()));
  return common.front();
}

}  // namespace pacer
