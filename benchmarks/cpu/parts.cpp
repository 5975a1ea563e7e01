#include "parts.h"

#include <algorithm>
#include <cstring>
#include <random>

#include <pacer/kernels/norm.h>
#include <pacer/kernels/onebit_lamb.h>

#include "support/shapes.h"
#include "support/threads.h"

namespace bench::cpu {
namespace {

using namespace pacer::kernels;
using pacer::kReductionUnit;
using pacer::Tile;

constexpr int64_t kRanks = 2;

std::vector<float> random_floats(int64_t count, float low, float high) {
  std::vector<float> values(static_cast<size_t>(count));
  std::minstd_rand generator(1);
  for (float& value : values) {
    value = low + (high - low) * static_cast<float>(generator()) * 0x1p-31f;
  }
  return values;
}

StepScalars scalars_of(UpdateRule rule) {
  RuleSettings settings;
  settings.rule = rule;
  StepScalars scalars{};
  adam_scalars_cpu({settings, 0, 1}, 1, scalars);
  return scalars;
}

// Messages of all ranks: random signs, every scale 0.01.
struct Messages {
  std::vector<unsigned char> memory;
  OneBitMessages view;

  Messages(int64_t chunk, bool rows_scaled) {
    const int64_t stride = onebit_message_bytes(chunk, rows_scaled);
    memory.resize(static_cast<size_t>(stride * kRanks));
    std::minstd_rand generator(2);
    for (unsigned char& byte : memory) byte = static_cast<unsigned char>(generator() >> 8);
    const std::vector<float> front(static_cast<size_t>((stride - chunk / 8) / 4), 0.01f);
    for (int64_t rank = 0; rank < kRanks; ++rank) {
      std::memcpy(memory.data() + rank * stride, front.data(), front.size() * sizeof(float));
    }
    view = {memory.data(), stride, kRanks, chunk, rows_scaled};
  }
};

// One side of an exchange.
struct Side {
  OneBitRows rows;
  std::vector<float> carried, scales;
  std::vector<unsigned char> signs;
  std::vector<double> sums;
  bool rows_scaled;

  Side(OneBitRows cut, bool by_rows)
      : rows(std::move(cut)),
        carried(random_floats(rows.extent, -0.01f, 0.01f)),
        scales(static_cast<size_t>(rows.count()), 0.005f),
        signs(static_cast<size_t>(rows.extent / 8)),
        sums(static_cast<size_t>(rows.count())),
        rows_scaled(by_rows) {}

  void compress(const OneBitSource& source, int threads) {
    const OneBitSide side{rows.pieces.data(), rows.first.data(),     rows.count(),
                          rows.extent,        carried.data(),        scales.data(),
                          rows_scaled,        pacer::ScaleNorm::rms, signs.data()};
    run_parts(threads, rows.units(), [&](int64_t begin, int64_t end) {
      for (int64_t unit = begin; unit < end; ++unit) {
        onebit_compress_cpu(side, source, unit, sums.data());
      }
    });
  }
};

// Everything with one scale, or with a scale for each row.
struct Exchange {
  OneBitLayout layout;
  Messages messages;
  Side worker, server;

  Exchange(const std::vector<int64_t>& counts, bool rows_scaled)
      : layout(counts, kRanks, rows_scaled ? kOneBitRow : kOneBitAlignment),
        messages(layout.chunk(), rows_scaled),
        worker(layout.rows(), rows_scaled),
        server(layout.served_rows(0), rows_scaled) {}
};

struct Memory {
  std::vector<int64_t> counts = gpt2().counts();
  Exchange whole{counts, false}, blocks{counts, true};
  std::vector<Tile> units = pacer::make_tiles(counts, kReductionUnit);
  std::vector<float> gradients, parameters, variance, fresh, floors;
  std::vector<double> sums, direction, update, factors, coefficients;
  std::vector<float> ratios, step_sizes, ones;
  std::vector<OneBitAdamTensor> tensors;
  StepScalars adam = scalars_of(UpdateRule::adam), lamb = scalars_of(UpdateRule::lamb);

  Memory() {
    const int64_t length = whole.layout.length();
    gradients = random_floats(length, -1, 1);
    parameters = random_floats(length, -1, 1);
    variance = random_floats(length, 0.5f, 1);
    fresh = variance;
    floors.assign(counts.size(), 0.001f);
    sums.resize(units.size());
    direction = update = sums;
    ratios.resize(units.size());
    factors.assign(counts.size(), 1.0);
    coefficients = factors;
    step_sizes.assign(counts.size(), 1e-5f);
    ones.assign(counts.size(), 1.0f);
    tensors.resize(counts.size());
    for (size_t i = 0; i < counts.size(); ++i) {
      tensors[i].parameter = parameters.data() + whole.layout.offset(i);
      tensors[i].gradient = gradients.data() + whole.layout.offset(i);
      tensors[i].begin = whole.layout.offset(i);
    }
  }

  OneBitAdamRows rows(const Exchange& exchange) {
    OneBitAdamRows rows{};
    rows.work.tensors = tensors.data();
    rows.work.scalars = &adam;
    rows.work.floors = floors.data();
    rows.work.variance = variance.data();
    rows.work.bits = exchange.messages.view;
    const OneBitRows& cut = exchange.worker.rows;
    rows.pieces = cut.pieces.data();
    rows.first = cut.first.data();
    rows.rows = cut.count();
    rows.extent = cut.extent;
    return rows;
  }

  OneBitLambWork lamb_work() {
    OneBitLambWork work{};
    work.now = rows(blocks).work;
    work.now.scalars = &lamb;
    work.now.momentum_scales = ones.data();
    work.bits_before = blocks.messages.view;
    work.fresh_variance = fresh.data();
    work.coefficients = coefficients.data();
    work.factors = factors.data();
    work.step_sizes = step_sizes.data();
    work.partials = {ratios.data(), direction.data(), update.data()};
    return work;
  }

  template <class F>
  void for_units(int threads, const F& f) const {
    run_parts(threads, static_cast<int64_t>(units.size()), [&](int64_t begin, int64_t end) {
      for (int64_t unit = begin; unit < end; ++unit) f(units[static_cast<size_t>(unit)], unit);
    });
  }

  // The gradients' memory, taken for elements of 2 bytes where the type has such.
  void norm(GradientType type, int64_t width, int threads) {
    for_units(threads, [&](const Tile& unit, int64_t index) {
      const auto* first = reinterpret_cast<const char*>(gradients.data());
      const int64_t place = whole.layout.offset(unit.tensor) + unit.offset;
      sums[static_cast<size_t>(index)] = sum_of_squares_cpu(type, first + place * width, unit.count);
    });
    GradientCheck check{};
    finish_check_cpu(sums.data(), static_cast<int64_t>(sums.size()), {}, &check);
  }
};

}  // namespace

std::vector<Part> make_parts() {
  const auto m = std::make_shared<Memory>();
  const auto all = static_cast<double>(m->whole.layout.length());
  const double served = all / kRanks;
  std::vector<Part> parts;
  parts.push_back({"norm and finite check, fp32", Mix::read, 4 * all,
                   [m](int threads) { m->norm(GradientType::f32, 4, threads); }});
  parts.push_back({"norm and finite check, bf16", Mix::read, 2 * all,
                   [m](int threads) { m->norm(GradientType::bf16, 2, threads); }});
  for (const bool by_rows : {false, true}) {
    Exchange* exchange = by_rows ? &m->blocks : &m->whole;
    const std::string scales = by_rows ? ", a scale for each block" : ", one scale";
    parts.push_back({"worker" + scales, Mix::update_from1, 12.25 * all, [m, exchange](int threads) {
                       const OneBitAdamRows rows = m->rows(*exchange);
                       const auto momentum_row = [&](int64_t row, int64_t width, float* values) {
                         onebit_momentum_row(rows, row, width, values);
                       };
                       exchange->worker.compress(momentum_row, threads);
                     }});
    parts.push_back(
        {"server" + scales, Mix::update, (8.125 + kRanks / 8.0) * served, [m, exchange](int threads) {
           const auto mean_row = [&](int64_t row, int64_t width, float* values) {
             decode_mean_cpu(exchange->messages.view, row * kOneBitRow, width, values);
           };
           exchange->server.compress(mean_row, threads);
         }});
    parts.push_back({"update" + scales, Mix::update_from1, 12.125 * all, [m, exchange](int threads) {
                       const OneBitAdamRows rows = m->rows(*exchange);
                       run_parts(threads, exchange->worker.rows.units(), [&](int64_t begin, int64_t end) {
                         for (int64_t unit = begin; unit < end; ++unit) onebit_update_cpu(rows, unit);
                       });
                     }});
  }
  parts.push_back({"1-bit LAMB, moments", Mix::update_from2, 16.25 * all, [m](int threads) {
                     const OneBitLambWork work = m->lamb_work();
                     m->for_units(threads, [&](const Tile& unit, int64_t index) {
                       onebit_lamb_moments_cpu(work, unit, index);
                     });
                   }});
  parts.push_back({"1-bit LAMB, update", Mix::update_from1, 12.125 * all, [m](int threads) {
                     const OneBitLambWork work = m->lamb_work();
                     m->for_units(threads,
                                  [&](const Tile& unit, int64_t) { onebit_lamb_update_cpu(work, unit); });
                   }});
  return parts;
}

}  // namespace bench::cpu
