// What a learning-rate schedule asks of its options, and how it calls itself in messages. What it makes of them
// is in learning_rate_schedule.cpp.
#pragma once

#include <pacer/schedulers/learning_rate_schedule.h>

namespace pacer::detail {

// Returns the function that makes such a schedule, or words for a decay that several functions take. Throws
// InvalidArgument for a value that is none of the enumeration's.
const char* rate_schedule_name(Decay decay);

// Whether it goes from 1 to end_factor over total_steps or total_tokens, of which a part can be stable.
bool has_an_end(Decay decay);

// Whether it is one_cycle, of either anneal.
bool is_one_cycle(Decay decay);

// Throws InvalidArgument for options that are out of range, missing, or of no use to this decay, and for one that is a
// function of the user's.
void check_rate_schedule_options(Decay decay, const LearningRateScheduleOptions& options);

}  // namespace pacer::detail
