// Which optimizer a state is of, so that no other one goes on from it: equal names of options and moments do
// not make equal rules.
#pragma once

#include <string>

#include <pacer/optimizers/named_tensors.h>

namespace pacer::detail {

// Keys of a state by name: the optimizer, a vector of bytes, and the state's version.
inline constexpr char kSavedBy[] = "optimizer";
inline constexpr char kVersion[] = "state_version";

// Throws InvalidArgument that names both where `saved` and `own` are not one optimizer.
void require_same_optimizer(const std::string& saved, const std::string& own);

// Writes both keys.
void write_saved_by(const std::string& optimizer, NamedTensors& state);
// The version of a state; 1 where it does not say.
int64_t version_of(const NamedTensors& state);
// The optimizer that saved it; empty where its version does not say. Throws InvalidArgument where it should.
std::string saved_by(const NamedTensors& state);

}  // namespace pacer::detail
