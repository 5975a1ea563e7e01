#include <pacer/session/save_best.h>

#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <map>
#include <optional>
#include <string_view>
#include <utility>

#include <c10/util/Exception.h>

#include <pacer/checkpoints/detail/merged_weights.h>
#include <pacer/checkpoints/detail/tensor_file.h>
#include <pacer/checkpoints/detail/training_state.h>
#include <pacer/collectives/detail/all_ranks_or_none.h>
#include <pacer/core/error.h>
#include <pacer/files/detail/replaced_file.h>
#include <pacer/files/file_system.h>
#include <pacer/files/folder_lock.h>
#include <pacer/files/number_text.h>
#include <pacer/files/safetensors.h>
#include <pacer/hooks/detail/best_value_state.h>
#include <pacer/hooks/detail/evaluation_scope.h>
#include <pacer/hooks/session_parts.h>
#include <pacer/hooks/sharded_state.h>
#include <pacer/hooks/step_report.h>

namespace pacer {
namespace {

template <class Number>
bool read_number(std::string_view text, Number& number) {
  const auto result = std::from_chars(text.data(), text.data() + text.size(), number);
  return result.ec == std::errc() && result.ptr == text.data() + text.size();
}

// The value of that name and its step in the file's metadata; nothing where there is no file.
std::optional<BestValue> best_in(const std::string& path, const std::string& name) {
  FileSystem& files = posix_file_system();
  const int opened = files.open_file(path);
  if (opened == -ENOENT) return std::nullopt;
  if (opened >= 0) files.close(opened);
  FileReader reader(files, path);
  const SafetensorsFile header = SafetensorsFile::read_header(reader, path);
  const auto metadata = header.metadata();
  const auto value = metadata.find(name), step = metadata.find("step");
  BestValue best;
  const bool is_ours = value != metadata.end() && step != metadata.end() &&
                       read_number(value->second, best.value) && read_number(step->second, best.step) &&
                       best.step >= 0;
  require(is_ours, path, " is there already and does not say a ", name,
          ", so it is no best model of such a run; move it away, or choose another folder");
  return best;
}

}  // namespace

SaveBest::SaveBest(std::string folder) : folder_(std::move(folder)) {
  require(!folder_.empty(), "SaveBest needs the name of a folder; it is empty");
}

SaveBest::~SaveBest() = default;
SaveBest::SaveBest(SaveBest&&) noexcept = default;

std::string SaveBest::path() const {
  return folder_ + (folder_.back() == '/' ? "" : "/") + "model.safetensors";
}

void SaveBest::attach(SessionParts& parts) {
  if (parts.is_first_rank()) make_folders(posix_file_system(), folder_);
  parts_ = &parts;
  parts.writes_whole_model = true;
}

void SaveBest::arrange() { detail::check_storable(detail::model_tensors(parts_->model())); }

void SaveBest::start(const Progress& progress) {
  require(!parts_->validation.name.empty(),
          "SaveBest has nothing to look at; add session.use(pacer::Validation(every, function))");
  adopt_older(progress);
}

// What the file has counts, also where this run's checkpoint is older than it. All ranks learn of it: where
// Shards keeps parts, they write together.
void SaveBest::adopt_older(const Progress& progress) {
  const ValidationResult& validation = parts_->validation;
  std::string found =
      detail::on_all_ranks_or_none(
          parts_->world(), std::chrono::minutes(30), "start training",
          [&]() -> std::string {
            if (!parts_->is_first_rank()) return "";
            if (!lock_)
              lock_ = std::make_unique<FolderLock>(folder_, "best", FolderLock::resuming(progress.step > 0));
            const std::optional<BestValue> best = best_in(path(), validation.name);
            return best ? exact_text(best->value) + ' ' + std::to_string(best->step) : "";
          })
          .front();
  if (found.empty()) return;
  BestValue older;
  const size_t space = found.find(' ');
  read_number(std::string_view(found).substr(0, space), older.value);
  read_number(std::string_view(found).substr(space + 1), older.step);
  if (!best_.is_beaten_by(older.value, 0, validation.larger_is_better)) return;
  best_ = older;
  if (!parts_->is_first_rank()) return;
  std::fprintf(stderr,
               "pacer: %s has the best model of an earlier %s, %s %s after step %lld; it stays until this "
               "one measures better\n",
               path().c_str(), progress.step == 0 ? "run" : "part of this run", validation.name.c_str(),
               found.substr(0, space).c_str(), static_cast<long long>(older.step));
}

void SaveBest::after_step(StepReport& report) { consider(report.progress()); }

void SaveBest::finish(const Progress& progress) {
  consider(progress);
  lock_.reset();
}

void SaveBest::consider(const Progress& progress) {
  const ValidationResult& found = parts_->validation;
  if (found.step != progress.step || found.step == seen_step_) return;
  seen_step_ = found.step;
  // The part of the run that was lost had measured this already; nothing came after it.
  if (found.step == best_.step && found.value == best_.value) {
    best_.since = 0;
    return;
  }
  BestValue best = best_;
  try {
    if (best.take(found.value, found.step, 0, found.larger_is_better)) write();
    best_ = best;
  } catch (const FileError& error) {
    TORCH_WARN(detail::concatenate("the best model so far (step ", found.step,
                                   ") was not saved: ", error.what(),
                                   "; training goes on, and the next better one is tried again"));
  }
}

// Rank 0 writes. Where the others have parts of the parameters, it needs them next time, too, so that they
// must know whether this time was one.
void SaveBest::write() const {
  const detail::HooksEvaluationScope as_measured(*parts_);
  NamedTensors model = detail::without_merged(parts_->model(), detail::model_tensors(parts_->model()));
  const ShardedState* sharded = parts_->sharded_state;
  if (!sharded || !sharded->keeps_parts()) {
    if (parts_->is_first_rank()) write_file(model);
    return;
  }
  model = sharded->gather_model(std::move(model), [](const std::string&) { return 0; });
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
  if (lock_) lock_->check();
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
