#include <pacer/checkpoints/detail/checkpoint_save.h>

#include <algorithm>

#include <pacer/checkpoints/detail/tensor_file.h>
#include <pacer/core/error.h>
#include <pacer/files/signals_blocked.h>

namespace pacer::detail {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

CheckpointSave::~CheckpointSave() {
  patience_ = std::min<std::chrono::milliseconds>(patience_, kGrace);
  if (thread_.joinable()) thread_.join();
}

void CheckpointSave::write_in_thread(TensorsByFile files) {
  in_thread_ = true;
  const SignalsBlocked for_the_thread;
  thread_ = std::thread([this, files = std::move(files)] {
    write(files, [] {});
    if (!write_error_) complete();
  });
}

void CheckpointSave::write_here(const TensorsByFile& files, const std::function<void()>& check) {
  write(files, check);
}

void CheckpointSave::wait_until_written() {
  is_written_.get_future().wait();
  if (write_error_) std::rethrow_exception(write_error_);
}

std::string CheckpointSave::wait() {
  if (thread_.joinable()) thread_.join();
  if (!in_thread_) complete();
  if (error_) std::rethrow_exception(error_);
  return folder_;
}

void CheckpointSave::write(const TensorsByFile& files, const std::function<void()>& check) noexcept {
  SaveRecord record;
  try {
    for (const auto& [name, tensors] : files) {
      const NamedTensors& of_file = tensors;
      FiniteCheck finite{job_.must_be_finite};
      const bool looks = job_.must_be_finite && name.compare(0, 5, "model") == 0;
      record.files.push_back(write_checkpoint_file(job_.staging, name, [&](ByteSink& sink) {
        write_tensors(sink, of_file, {}, looks ? &finite : nullptr);
      }));
      record.is_finite = record.is_finite && finite.is_finite;
    }
    for (const auto& [name, text] : job_.texts) {
      const std::string& of_file = text;
      record.files.push_back(write_checkpoint_file(
          job_.staging, name, [&](ByteSink& sink) { sink.write(of_file.data(), of_file.size()); }));
    }
    check();
    written_ = record.files;
    is_finite_ = record.is_finite;
    if (job_.rank != 0) leave_record(job_.staging, job_.rank, record);
  } catch (const std::exception& error) {
    write_error_ = std::current_exception();
    try {
      if (job_.rank != 0) leave_record(job_.staging, job_.rank, {{}, error.what(), true});
    } catch (const std::exception&) {
      // Rank 0 hears of it when the ranks compare what became of the save.
    }
  }
  is_written_.set_value();
}

void CheckpointSave::complete() noexcept {
  if (job_.rank != 0) return;
  try {
    for (const CheckpointFile& file : written_) job_.writer->adopt(file);
    for (int64_t rank = 1; rank < job_.facts.world_size; ++rank) {
      const SaveRecord record = record_of(static_cast<int>(rank));
      require<FileError>(record.failure.empty(), "rank ", rank,
                         " could not write its part: ", record.failure);
      for (const CheckpointFile& file : record.files) job_.writer->adopt(file);
      is_finite_ = is_finite_ && record.is_finite;
    }
    job_.facts.is_finite = is_finite_;
    folder_ = job_.writer->commit(job_.facts);
  } catch (const std::exception&) {
    error_ = std::current_exception();
    return;
  }
  try {
    try {
      not_removed_ = remove_old_checkpoints(job_.root, job_.keep, posix_file_system(), job_.step, job_.stays);
    } catch (const FileError& error) {
      not_removed_.push_back({-1, error.what()});  // the root cannot be listed; the checkpoint is good
    }
  } catch (const std::exception&) {
    // No memory is left. The checkpoint is good all the same, and the next save removes the older ones.
  }
}

// Waits for the record of another rank.
SaveRecord CheckpointSave::record_of(int rank) const {
  constexpr std::chrono::milliseconds kLongestPause{100};
  const Clock::time_point start = Clock::now();
  for (std::chrono::milliseconds pause{1};; pause = std::min(2 * pause, kLongestPause)) {
    if (const auto record = take_record(job_.staging, rank)) return *record;
    require<FileError>(Clock::now() - start < patience_.load(), "rank ", rank,
                       " has not written its part of the checkpoint in ", job_.staging, " within ",
                       patience_.load().count(), " ms; see whether it still runs and reaches that folder");
    std::this_thread::sleep_for(pause);
  }
}

}  // namespace pacer::detail
