#include "piped_gpt.h"

#include <numeric>

#include <pacer/core/error.h>

namespace convergence {
namespace {

// So many that at most a fifth of a step is idle, where these divide training and validation batches.
int64_t micro_batches(int64_t batch, const std::vector<ByteBatch>& validation, int64_t ranks) {
  constexpr int64_t kPerRank = 4;
  int64_t count = std::gcd(batch, kPerRank * ranks);
  for (const auto& [x, y] : validation) count = std::gcd(count, x.size(0));
  return count;
}

pacer::Pipeline make_pipeline(Gpt model, const Settings& settings, const std::vector<ByteBatch>& validation,
                              const std::shared_ptr<pacer::Communicator>& world) {
  const int ranks = world->world_size();
  pacer::require(settings.layers >= ranks, "the arm pipeline needs a layer for each rank, but there are ",
                 settings.layers, " layers and ", ranks, " ranks");
  // The head is the bytes' embedding: both ends use it.
  return {*model,
          model->blocks(),
          &BlockImpl::forward,
          pacer::Grid(world, ranks),
          pacer::one_f_one_b(micro_batches(settings.batch, validation, ranks)),
          pacer::PipelineOptions()
              .first({"byte_embedding", "position_embedding"})
              .last({"byte_embedding", "output_norm"})};
}

}  // namespace

PipedGpt::PipedGpt(const Gpt& model, const Settings& settings, const std::vector<ByteBatch>& validation,
                   const std::shared_ptr<pacer::Communicator>& world)
    : model_(model), pipeline_(make_pipeline(model, settings, validation, world)) {}

void PipedGpt::step(pacer::Session& session, const ByteBatch& batch) {
  pipeline_.step(
      session, batch.first, batch.second, [&](const at::Tensor& bytes) { return model_->embed(bytes); },
      [&](const at::Tensor& x, const at::Tensor& y) { return next_byte_loss(model_->logits(x), y); });
}

double PipedGpt::validation_loss(const std::vector<ByteBatch>& batches) {
  double sum = 0.0, sequences = 0.0;
  for (const auto& [x, y] : batches) {
    const auto size = static_cast<double>(x.size(0));
    const at::Tensor loss = pipeline_.evaluate(
        x, y, [&](const at::Tensor& bytes) { return model_->embed(bytes); },
        [&](const at::Tensor& h, const at::Tensor& targets) {
          return next_byte_loss(model_->logits(h), targets);
        });
    sum += size * loss.item<double>();
    sequences += size;
  }
  return sum / sequences;
}

}  // namespace convergence
