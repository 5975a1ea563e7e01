// What rank 0 shows and writes: tables on the terminal, measurements.csv and bubble.csv, and charts.
#pragma once

#include <string>
#include <vector>

#include "bubble.h"
#include "experiments.h"

namespace collectives {

struct ExchangeResults {
  ExchangeSize size;
  std::vector<Measured> measurements;
};

// Where and how it was measured.
struct Setting {
  int world_size = 1;
  std::string backend;
  double rate = 0;  // bits per second of a link, 0: not known
};

// One line for people: ranks, back-end, link.
std::string describe(const Setting& setting);

// The table of one size, of the slowest rank's times: beside each scheme its ratio to buckets and, with a
// rate, to the time in which the link can carry the least bytes.
std::string exchange_table(const Setting& setting, const ExchangeResults& results);
std::string step_table(const StepResults& results);

std::string as_csv(const Setting& setting, const std::vector<ExchangeResults>& exchanges,
                   const StepResults& step);
std::string exchange_chart(const Setting& setting, const std::vector<ExchangeResults>& exchanges);
std::string step_chart(const Setting& setting, const StepResults& step);

// The bubble is simulated: it knows no setting. `bubbles` are those of simulate_bubbles(settings).
std::string bubble_table(const BubbleSettings& settings, const std::vector<Bubble>& bubbles);
std::string bubble_csv(const BubbleSettings& settings, const std::vector<Bubble>& bubbles);
std::string idle_chart(const BubbleSettings& settings, const std::vector<Bubble>& bubbles);
std::string alive_chart(const BubbleSettings& settings, const std::vector<Bubble>& bubbles);

}  // namespace collectives
