#include <pacer/schedulers/save_best.h>

#include <array>
#include <charconv>
#include <map>
#include <utility>

#include <c10/util/Exception.h>

#include <pacer/core/error.h>
#include <pacer/core/file_system.h>
#include <pacer/schedulers/detail/best_value_state.h>
#include <pacer/schedulers/detail/replaced_file.h>
#include <pacer/schedulers/detail/tensor_file.h>
#include <pacer/schedulers/detail/training_state.h>
#include <pacer/schedulers/session_parts.h>
#include <pacer/schedulers/shards.h>
#include <pacer/schedulers/step_report.h>
#include <pacer/schedulers/validation.h>

namespace pacer {
namespace {

// As it reads back to the same bits, whatever the locale.
std::string exact_text(double value) {
  std::array<char, 32> digits;
  const auto result = std::to_chars(digits.data(), digits.data() + digits.size(), value);
  return std::string(digits.data(), result.ptr);
}

}  // namespace

SaveBest::SaveBest(std::string folder) : folder_(std::move(folder)) {
  require(!folder_.empty(), "SaveBest needs the name of a folder; it is empty");
}

std::string SaveBest::path() const {
  return folder_ + (folder_.back() == '/' ? "" : "/") + "model.safetensors";
}

void SaveBest::attach(SessionParts& parts) {
  if (parts.is_first_rank()) make_folders(posix_file_system(), folder_);
  parts_ = &parts;
}

void SaveBest::start(const Progress& /*progress*/) {
  require(parts_->find<Validation>() != nullptr,
          "SaveBest has nothing to look at; add session.use(pacer::Validation(every, function))");
}

void SaveBest::after_step(StepReport& report) { consider(report.progress()); }

void SaveBest::finish(const Progress& progress) { consider(progress); }

void SaveBest::consider(const Progress& progress) {
  const ValidationResult& found = parts_->validation;
  if (found.step != progress.step || found.step == seen_step_) return;
  seen_step_ = found.step;
  BestValue best = best_;
  try {
    if (best.take(found.value, found.step, 0, found.larger_is_better)) write();
    best_ = best;
  } catch (const FileError& error) {
    TORCH_WARN("the best model so far (step ", found.step, ") was not saved: ", error.what(),
               "; training goes on, and the next better one is tried again");
  }
}

// Rank 0 writes. Where the others have parts of the parameters, it needs them next time, too, so that they
// must know whether this time was one.
void SaveBest::write() const {
  NamedTensors model = detail::model_tensors(parts_->model());
  const auto* shards = parts_->find<Shards>();
  if (!shards || !shards->keeps_parts()) {
    if (parts_->is_first_rank()) write_file(model);
    return;
  }
  model = shards->gather_model(std::move(model), [](const std::string&) { return 0; });
  std::string failure;
  try {
    if (parts_->is_first_rank()) write_file(model);
  } catch (const FileError& error) {
    failure = error.what();
  }
  failure = parts_->world().exchange(failure).front();
  require<FileError>(failure.empty(), failure);
}

void SaveBest::write_file(const NamedTensors& model) const {
  const std::map<std::string, std::string> metadata = {
      {"step", std::to_string(parts_->validation.step)},
      {parts_->validation.name, exact_text(parts_->validation.value)}};
  detail::write_next(path(), [&](ByteSink& out) { detail::write_tensors(out, model, metadata); });
  detail::put_next_in_place(path());
  sync_folder(posix_file_system(), folder_);
}

void SaveBest::save(NamedTensors& state) const { detail::save_best_value(best_, state); }

void SaveBest::load(const NamedTensors& state) {
  best_ = detail::load_best_value(state);
  seen_step_ = -1;
}

}  // namespace pacer
