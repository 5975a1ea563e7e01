#include "kernels.h"

#include <cstring>
#include <numeric>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include <pacer/device/detail/device_buffer.h>
#include <pacer/device/detail/stream.h>
#include <pacer/kernels/norm.h>
#include <pacer/kernels/onebit_lamb.h>

namespace bench::onebit {
namespace {

using namespace pacer::kernels;
using pacer::Tile;
using pacer::detail::DeviceBuffer;

template <class T>
void fill(DeviceBuffer<T>& buffer, std::vector<T> values, at::Device device) {
  buffer.host() = std::move(values);
  buffer.send(device);
}

}  // namespace

struct Kernels::Memory {
  pacer::Communicator& world;
  at::Device device;
  OneBitLayout layout;
  bool block_scales;
  int64_t stride;
  OneBitRows served;
  at::Tensor gradients, parameters, variance, floors, carried, served_carried, scales, sums, sent, received,
      own, gathered, scalars, partials, check, number, numbers, from, to;
  // Of 1-bit LAMB.
  at::Tensor lamb_scalars, fresh, ones, step_sizes, coefficients, factors, ratios, lamb_sums;
  DeviceBuffer<OneBitLambTensor> lamb_tensors;
  DeviceBuffer<uint32_t> places;
  DeviceBuffer<uint32_t> tensors_of;
  DeviceBuffer<int64_t> ends;
  DeviceBuffer<OneBitAdamTensor> tensors;
  DeviceBuffer<AdamGradient> pointers;
  DeviceBuffer<Tile> tiles, units;

  Memory(const std::vector<int64_t>& counts, bool blocks, pacer::Communicator& w)
      : world(w),
        device(w.device()),
        layout(counts, w.world_size()),
        block_scales(blocks),
        stride(onebit_message_bytes(layout.chunk(), blocks)),
        served(layout.served_rows(w.rank())) {
    const auto f32 = at::TensorOptions().device(device).dtype(at::kFloat);
    const auto bytes = f32.dtype(at::kByte), f64 = f32.dtype(at::kDouble);
    const int64_t n = layout.length(), ranks = w.world_size();
    gradients = at::randn({n}, f32);
    parameters = at::randn({n}, f32);
    variance = at::rand({n}, f32);
    floors = at::zeros({static_cast<int64_t>(counts.size())}, f32);
    carried = at::randn({n}, f32);
    served_carried = at::randn({served.extent}, f32);
    scales = at::ones({2, n / kOneBitRow + 1}, f32);
    sums = at::zeros({n / pacer::kReductionUnit + 1}, f64);
    for (at::Tensor* messages : {&sent, &received, &gathered}) *messages = random_signs(ranks);
    own = at::randint(256, {stride}, bytes);
    check = at::zeros({static_cast<int64_t>(sizeof(GradientCheck))}, bytes);
    number = at::ones({1}, f64);
    numbers = at::ones({ranks}, f64);
    from = at::randn({int64_t{1} << 28}, f32);
    to = at::empty_like(from);
    scalars = scalars_of(RuleSettings{});
    std::vector<OneBitAdamTensor> list(counts.size());
    std::vector<AdamGradient> pointer_list;
    for (size_t i = 0; i < counts.size(); ++i) {
      list[i].parameter = parameters.mutable_data_ptr<float>() + layout.offset(i);
      list[i].gradient = gradients.const_data_ptr<float>() + layout.offset(i);
      list[i].begin = layout.offset(i);
      list[i].storage = AdamStorage::f32;
      pointer_list.push_back({list[i].gradient, 0});
    }
    fill(tensors, std::move(list), device);
    fill(pointers, std::move(pointer_list), device);
    fill(tensors_of, layout.tensors(), device);
    fill(ends, layout.ends(), device);
    std::vector<Tile> in_buffer = pacer::make_tiles(counts, kOneBitBlockTile);
    for (Tile& tile : in_buffer) tile.offset += layout.offset(tile.tensor);
    fill(tiles, std::move(in_buffer), device);
    fill(units, pacer::make_tiles(counts, pacer::kReductionUnit), device);
    partials = at::zeros({static_cast<int64_t>(units.host().size())}, f64);
    make_lamb(f32, f64);
  }

  at::Tensor scalars_of(const RuleSettings& settings) const {
    StepScalars host{};
    adam_scalars_cpu({settings, 0, 1}, 1, host);
    const at::Tensor bytes = at::empty({static_cast<int64_t>(sizeof host)}, at::kByte);
    std::memcpy(bytes.mutable_data_ptr(), &host, sizeof host);
    return bytes.to(device);
  }

  // Scales of random bytes would be no numbers, and divisions take longer by those.
  at::Tensor random_signs(int64_t ranks) const {
    const at::Tensor messages =
        at::randint(256, {ranks, stride}, at::TensorOptions().dtype(at::kByte).device(device));
    OneBitHeader header{};
    header.scale = block_scales ? 0.0f : 0.01f;
    header.rows_scaled = block_scales ? 1 : 0;
    const at::Tensor front = at::full({(stride - layout.chunk() / 8) / 4}, 0.01f);
    std::memcpy(front.mutable_data_ptr(), &header, sizeof header);
    const at::Tensor bytes = front.view(at::kByte);
    messages.narrow(1, 0, bytes.numel()).copy_(bytes.expand({ranks, bytes.numel()}));
    return messages.view({-1});
  }

  void make_lamb(const at::TensorOptions& f32, const at::TensorOptions& f64) {
    const auto tensor_count = static_cast<int64_t>(layout.counts().size());
    const auto unit_count = static_cast<int64_t>(units.host().size());
    fresh = at::rand({layout.length()}, f32);
    ones = at::ones({tensor_count}, f32);
    step_sizes = at::zeros({tensor_count}, f32);
    coefficients = at::ones({tensor_count}, f64);
    factors = at::ones({tensor_count}, f64);
    ratios = at::zeros({unit_count}, f32);
    lamb_sums = at::zeros({2, unit_count}, f64);
    RuleSettings settings;
    settings.rule = UpdateRule::lamb;
    lamb_scalars = scalars_of(settings);
    std::vector<OneBitLambTensor> list;
    for (const pacer::TileRange& own : pacer::tile_ranges(units.host(), layout.counts().size())) {
      list.push_back({own, {0.5, 4.0, 0.1}});
    }
    std::vector<uint32_t> numbers(units.host().size());
    std::iota(numbers.begin(), numbers.end(), 0u);
    fill(lamb_tensors, std::move(list), device);
    fill(places, std::move(numbers), device);
  }

  Stream stream() const { return pacer::detail::current_stream(device); }
  OneBitMessages messages(const at::Tensor& memory) const {
    return {memory.const_data_ptr<uint8_t>(), stride, world.world_size(), layout.chunk(), block_scales};
  }
  OneBitAdamWork work() const {
    OneBitAdamWork work{};
    work.tensors = tensors.pointer();
    work.scalars = static_cast<const StepScalars*>(scalars.const_data_ptr());
    work.floors = floors.const_data_ptr<float>();
    work.variance = variance.mutable_data_ptr<float>();
    work.bits = messages(gathered);
    work.is_from_signs = true;
    return work;
  }
  OneBitLambWork lamb() const {
    OneBitLambWork lamb{};
    lamb.now = work();
    lamb.now.scalars = static_cast<const StepScalars*>(lamb_scalars.const_data_ptr());
    lamb.now.momentum_scales = ones.const_data_ptr<float>();
    lamb.bits_before = messages(received);
    lamb.fresh_variance = fresh.mutable_data_ptr<float>();
    lamb.tensors = lamb_tensors.pointer();
    lamb.coefficients = coefficients.const_data_ptr<double>();
    lamb.factors = factors.mutable_data_ptr<double>();
    lamb.step_sizes = step_sizes.mutable_data_ptr<float>();
    auto* sums = lamb_sums.mutable_data_ptr<double>();
    lamb.partials = {ratios.mutable_data_ptr<float>(), sums, sums + lamb_sums.size(1)};
    return lamb;
  }
  OneBitCudaSide side(bool worker) const {
    OneBitCudaSide side{};
    side.tensors = tensors_of.pointer();
    side.ends = ends.pointer();
    side.origin = worker ? 0 : world.rank() * layout.chunk();
    side.extent = worker ? layout.length() : served.extent;
    side.real_elements = side.extent;
    side.carried = (worker ? carried : served_carried).mutable_data_ptr<float>();
    side.scales = scales[worker ? 0 : 1].mutable_data_ptr<float>();
    side.rows_scaled = block_scales;
    side.norm = pacer::ScaleNorm::rms;
    side.messages = (worker ? sent : own).mutable_data_ptr<uint8_t>();
    side.stride = stride;
    side.chunk = layout.chunk();
    side.message_count = worker ? world.world_size() : 1;
    side.sums = sums.mutable_data_ptr<double>();
    return side;
  }
};

Kernels::Kernels(const std::vector<int64_t>& counts, bool block_scales, pacer::Communicator& world)
    : memory_(std::make_unique<Memory>(counts, block_scales, world)) {}
Kernels::~Kernels() = default;

void Kernels::copy() const { memory_->to.copy_(memory_->from); }
double Kernels::copied_bytes() const { return 8.0 * static_cast<double>(memory_->from.numel()); }

std::vector<Part> Kernels::parts() const {
  Memory* const m = memory_.get();
  const auto n = static_cast<double>(m->layout.length()), served = static_cast<double>(m->served.extent);
  const OneBitControl free{};
  const OneBitCall call{};
  const auto agreed = pacer::CollectiveOptions().agreed(true);
  return {
      {"kernel: sum of squares", 4 * n,
       [=] {
         sum_of_squares_cuda(GradientType::f32, m->units.pointer(),
                             static_cast<int64_t>(m->units.host().size()), m->pointers.pointer(), nullptr,
                             m->partials.mutable_data_ptr<double>(), m->stream());
       }},
      {"kernel: worker", 12.25 * n,
       [=] {
         onebit_compress_momentum_cuda(m->side(true), m->work(), {true, AdamStorage::f32}, free, m->stream());
       }},
      {"kernel: server", (m->world.world_size() / 8.0 + 8.125) * served,
       [=] { onebit_compress_mean_cuda(m->side(false), m->messages(m->received), free, m->stream()); }},
      // The server rewrites its errors where they are: what LibTorch reaches so, and in a copy of that
      // length.
      {"peer: LibTorch's mul_ of the server's errors", 8 * served, [=] { m->served_carried.mul_(1.0); }},
      {"peer: LibTorch's copy_ of as many", 8 * served,
       [=] {
         m->to.narrow(0, 0, m->served_carried.numel()).copy_(m->from.narrow(0, 0, m->served_carried.numel()));
       }},
      {"kernel: update", 12.125 * n,
       [=] {
         const auto count = static_cast<int64_t>(m->tiles.host().size());
         onebit_update_cuda(AdamStorage::f32, {m->tiles.pointer(), count, 0}, m->work(), false, free,
                            m->stream());
       }},
      {"kernel: scale and headers", 0,
       [=] { onebit_finish_side_cuda(m->side(true), call, free, m->stream()); }},
      {"collective: all_to_all of signs", 0,
       [=] { m->world.all_to_all(m->received, m->sent, agreed).wait(); }},
      {"collective: all_gather of signs", 0,
       [=] { m->world.all_gather(m->gathered, m->own, agreed).wait(); }},
      {"collective: all_gather of one number", 0,
       [=] { m->world.all_gather(m->numbers, m->number, agreed).wait(); }},
      {"kernel: moments of 1-bit LAMB", 16.25 * n,
       [=] {
         onebit_lamb_moments_cuda(AdamStorage::f32, m->units.pointer(), m->places.pointer(),
                                  static_cast<int64_t>(m->units.host().size()), m->lamb(), false, free,
                                  m->stream());
       }},
      {"kernel: factors of 1-bit LAMB", 0,
       [=] {
         onebit_lamb_factors_cuda(static_cast<int64_t>(m->layout.counts().size()), m->lamb(), free,
                                  m->stream());
       }},
      {"kernel: update of 1-bit LAMB", 12.125 * n,
       [=] {
         const auto count = static_cast<int64_t>(m->tiles.host().size());
         onebit_lamb_update_cuda(AdamStorage::f32, {m->tiles.pointer(), count, 0}, m->lamb(), false, free,
                                 m->stream());
       }},
  };
}

}  // namespace bench::onebit
