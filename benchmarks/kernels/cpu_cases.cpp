#include <cstdlib>
#include <exception>

#include <ATen/Parallel.h>

#include <pacer/core/error.h>

#include "contenders.h"
#include "runs.h"
#include "support/streams.h"
#include "support/table.h"
#include "support/timing.h"
#include "support/value_in_file.h"  // of examples/

namespace bench::kernels {
namespace {

// Throws where a contender fails or disagrees: on the CPU they are timed together or not at all.
std::vector<Contender> compared_contenders(const Case& which, const std::vector<ContenderPlan>& plans,
                                           ModelData& data) {
  std::vector<Contender> contenders;
  for (const auto& plan : plans) {
    contenders.push_back(plan.make(data));
    for (int i = 0; i < kComparedSteps; ++i) contenders.back().step();
  }
  Reference reference = exact_reference(which.work, data);
  if (reference.results.empty()) reference.results = contenders[1].results;
  for (size_t i = 0; i < contenders.size(); ++i) require_agreement(plans[i], contenders[i], reference);
  data.initial.clear();  // its memory is not needed any more
  return contenders;
}

// The two ceilings and all contenders in turn.
CaseResult measure(const Case& which, int threads, const std::vector<ContenderPlan>& plans,
                   const std::vector<Contender>& contenders, const Patience& patience, Streams& memory,
                   Report& report) {
  at::set_num_threads(threads);
  std::vector<std::function<void()>> works = {[&] { memory.run(Mix::copy, threads); },
                                              [&] { memory.run(Mix::update, threads); }};
  for (const auto& contender : contenders) works.push_back(contender.step);
  for (const auto& work : works) work();
  const std::vector<Interleaved> spreads = interleave(works, patience);

  const auto timing = [&](const char* kind, Spread Interleaved::*of, size_t i) {
    const auto per_second = [&](size_t k) {
      return memory.bytes(Mix::copy) / ((spreads[k].*of).median * 1e-3);
    };
    return Timing{kind, "in turn", spreads[i].*of, {per_second(0), per_second(1)}};
  };
  CaseResult result{which, threads, {}};
  for (size_t i = 0; i < plans.size(); ++i) {
    result.measurements.push_back(
        {plans[i].name, plans[i].meaning, {timing("wall", &Interleaved::wall, i + 2)}});
    // With more threads, nobody adds up the time of all of them.
    if (threads == 1) {
      result.measurements.back().timings.push_back(timing("processor", &Interleaved::processor, i + 2));
    }
    if (i == 0) {
      const Ceiling& ceiling = result.measurements[0].timings[0].ceiling;
      report.bandwidth(which.name, name_of(Mix::copy), ceiling.copy);
      report.bandwidth(which.name, name_of(Mix::update), ceiling.update);
    }
    report.progress(result, result.measurements.back());
  }
  return result;
}

}  // namespace

void run_on_cpu(const std::vector<Case>& cases, const Effort& effort, Report& report) {
  const int all_threads = at::get_num_threads();
  std::vector<int> thread_counts = {1};
  if (all_threads > 1) thread_counts.push_back(all_threads);
  if (effort.threads > 0) thread_counts = {effort.threads};
  Patience patience = effort.quick ? Patience{5, 3, 8} : Patience{15, 5, 40};
  if (effort.repetitions > 0) patience = {effort.repetitions, effort.repetitions, 0};

  // An optimizer writes where it has read, as the update does; memcpy, which is the usual measure, writes
  // elsewhere, which costs some processors half of their bandwidth.
  Streams memory(int64_t{128} << 20);
  for (const Case& which : cases) {
    const ModelShapes model = which.model();
    const int64_t needed = model.parameters() * facts_of(which.work).peak_bytes_per_parameter;
    const std::string free = examples::value_in_file("/proc/meminfo", "MemAvailable");  // "123 kB"
    if (!report.has_room(which.name, "memory", needed,
                         free.empty() ? needed : std::atoll(free.c_str()) * 1024)) {
      continue;
    }
    try {
      at::set_num_threads(all_threads);
      const std::vector<ContenderPlan> plans = contender_plans(which.work, Device::cpu);
      ModelData data = make_model_data(model, which.work, at::kCPU);
      const std::vector<Contender> contenders = compared_contenders(which, plans, data);
      for (const int threads : thread_counts) {
        report.add(measure(which, threads, plans, contenders, patience, memory, report));
      }
    } catch (const std::exception& error) {
      report.failed(which.name, error.what());
    }
    at::set_num_threads(all_threads);
  }
}

}  // namespace bench::kernels
