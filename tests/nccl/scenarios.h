// What the ranks of a run do and check. Results first, then order and memory, then trouble.
#pragma once

#include "nccl/rank_process.h"

namespace pacer::testing {

// nccl_results.cpp: every operation against values computed on the CPU.
void check_results(RankProcess& process, const std::shared_ptr<detail::Transport>& transport);
// nccl_order.cpp: streams, threads, memory, deadlines that must not fire, listeners, speed.
void check_order(RankProcess& process, const std::shared_ptr<detail::Transport>& transport);

// All of both, on one transport.
void run_healthy(RankProcess& process);
// One all-reduce, for after the others.
void run_again(RankProcess& process);

// nccl_failures.cpp: in these the last rank is lost,
void run_stopped(RankProcess& process);
void run_stopped_before_first_use(RankProcess& process);
void run_killed(RankProcess& process);
// and in these not.
void run_absent_at_set_up(RankProcess& process);
void run_abort(RankProcess& process);
void run_trouble(RankProcess& process);
void run_unfinished(RankProcess& process);

}  // namespace pacer::testing
