#include <pacer/optimizers/session_optimizer.h>

#include <pacer/core/error.h>

namespace pacer {

void SessionOptimizer::claim_learning_rate(const void* owner, const std::string& name) {
  require(learning_rate_owner_ == nullptr || learning_rate_owner_ == owner, name,
          " cannot set the learning rate, because ", learning_rate_owner_name_,
          " already does; keep one of the two");
  learning_rate_owner_ = owner;
  learning_rate_owner_name_ = name;
}

void SessionOptimizer::release_learning_rate(const void* owner) noexcept {
  if (learning_rate_owner_ == owner) learning_rate_owner_ = nullptr;
}

}  // namespace pacer
