// Keeps the weights of the best model so far: whenever validation improves, rank 0 writes parameters and
// buffers to model.safetensors in a folder, and Python's `safetensors` reads them as they are. The file is
// replaced as a whole, so a run that is killed leaves the former best or the new one. Its metadata say the
// step and the value. For a run that goes on as if it had never stopped there are Checkpoints.
//
// The folder belongs to one run at a time. Where it has the best model of an earlier run, that one stays
// until this run measures better, and a line on stderr says so.
//
// A write that fails is a warning, and training goes on: the best stays what it was, and the next value
// better than that is written.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <pacer/hooks/best_value.h>
#include <pacer/hooks/hook.h>

namespace pacer {

class FolderLock;

class SaveBest : public Hook {
 public:
  // The folder is created where it is missing, with those above it. Throws InvalidArgument for an empty name.
  explicit SaveBest(std::string folder);
  ~SaveBest() override;
  SaveBest(SaveBest&&) noexcept;

  std::string hook_name() const override { return "save_best"; }
  Slot slot() const override { return Slot::decide; }
  // FileError where the folder cannot be made (on rank 0).
  void attach(SessionParts& parts) override;
  // Throws InvalidArgument for a model that no file can hold.
  void arrange() override;
  // Throws InvalidArgument where the Session has no Validation hook, where another run has the folder, and
  // where the file there does not say a value of this validation.
  void start(const Progress& progress) override;
  void after_step(StepReport& report) override;
  void finish(const Progress& progress) override;
  // The best value, its step, and the measurements since.
  void save(NamedTensors& state) const override;
  void load(const NamedTensors& state) override;

  // The path of the file.
  std::string path() const;
  const BestValue& best() const { return best_; }

 private:
  void consider(const Progress& progress);
  void adopt_older(const Progress& progress);
  void write() const;
  void write_file(const NamedTensors& model) const;

  std::string folder_;
  BestValue best_;
  int64_t seen_step_ = -1;  // of the validation that was considered last
  SessionParts* parts_ = nullptr;
  std::unique_ptr<FolderLock> lock_;  // of rank 0, from start to finish
};

}  // namespace pacer
