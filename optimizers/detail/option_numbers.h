// The numbers of parameter groups as ranks compare them: all that the options hold, but for initial_lr, from
// which lr follows.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <pacer/collectives/agreement.h>

namespace pacer::detail {

// Is called with every number of every group, by its name; booleans and enumerators are integers.
class NumberVisitor {
 public:
  virtual void begin_group(size_t group) = 0;
  virtual void operator()(const char* name, double value) = 0;
  virtual void operator()(const char* name, int64_t value) = 0;

 protected:
  ~NumberVisitor() = default;
};

// Collects their bytes, for a checksum.
class NumberBytes final : public NumberVisitor {
 public:
  void begin_group(size_t group) override { add(&group, sizeof group); }
  void operator()(const char* /*name*/, double value) override { add(&value, sizeof value); }
  void operator()(const char* /*name*/, int64_t value) override { add(&value, sizeof value); }
  const std::string& bytes() const { return bytes_; }

 private:
  void add(const void* data, size_t size) { bytes_.append(static_cast<const char*>(data), size); }

  std::string bytes_;
};

// Collects their texts, for messages.
class NumberFacts final : public NumberVisitor {
 public:
  void begin_group(size_t group) override { group_ = group; }
  void operator()(const char* name, double value) override;
  void operator()(const char* name, int64_t value) override;
  std::vector<Fact> facts() && { return std::move(facts_); }

 private:
  size_t group_ = 0;
  std::vector<Fact> facts_;
};

}  // namespace pacer::detail
