#include "support/byte_training.h"

#include <cstdio>
#include <vector>

#include <pacer/pacer.h>

#include "support/byte_model.h"

namespace examples {
namespace {

long long whole(int64_t number) { return static_cast<long long>(number); }

}  // namespace

void ByteTraining::run(const char* name, torch::nn::Sequential model,
                       torch::optim::Optimizer& optimizer) const {
  const int64_t ranks = world->world_size(), sent_before = world->bytes_sent();
  pacer::require(batch % ranks == 0, "a batch of ", batch, " cannot be shared evenly by ", ranks,
                 " processes; start 1, 2, 4, 8 ...");
  pacer::EpochSampler sampler(static_cast<size_t>(windows.size(0)), /*seed=*/1, *world);
  pacer::Session session(*model, optimizer, world);
  session.use(pacer::GradientClipping(1.0))
      .use(pacer::LearningRate(pacer::warmup_cosine({steps / 10, steps})))
      .use(sampler);
  double loss_sum = 0;  // over the last tenth
  while (session.progress().step < steps) {
    const auto rows = sampler.next(static_cast<size_t>(batch / ranks));
    if (!rows) {
      sampler.reset();
      continue;
    }
    const std::vector<int64_t> chosen(rows->begin(), rows->end());
    const auto examples = windows.index_select(0, torch::tensor(chosen));
    auto [x, y] = session.begin(examples.narrow(1, 0, kContext), examples.select(1, kContext));
    const auto loss = torch::cross_entropy_loss(model->forward(x), y);
    session.backward(loss);
    session.step();
    if (session.progress().step > steps - steps / 10) loss_sum += loss.item<double>();
  }
  session.finish();
  const auto loss = torch::full({1}, loss_sum / static_cast<double>(steps / 10 * ranks), torch::kDouble);
  world->all_reduce(loss).wait();
  if (world->rank() != 0) return;
  std::printf("%-12s loss %.3f nats per byte over the last %lld of %lld steps, %.2f MB sent per rank\n", name,
              loss.item<double>(), whole(steps / 10), whole(steps),
              static_cast<double>(world->bytes_sent() - sent_before) / 1e6);
}

void ByteTraining::print_phases(const char* name, const pacer::OneBitOptimizer& optimizer) const {
  if (world->rank() != 0) return;
  const int64_t warm_up = *optimizer.frozen_at();
  std::printf("%s averaged gradients for %lld steps; in the %lld after them each rank sent %.2f MB\n", name,
              whole(warm_up), whole(optimizer.attempts() - warm_up),
              static_cast<double>(optimizer.bytes_sent()) / 1e6);
}

}  // namespace examples
