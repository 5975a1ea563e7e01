// Everything of hooks: the frame of a training step, and the hooks of every loop.
#pragma once

#include <pacer/hooks/batch.h>
#include <pacer/hooks/batch_schedule.h>
#include <pacer/hooks/best_value.h>
#include <pacer/hooks/cuda_graph.h>
#include <pacer/hooks/epoch_sampler.h>
#include <pacer/hooks/gradient_accumulation.h>
#include <pacer/hooks/gradient_clipping.h>
#include <pacer/hooks/gradient_release.h>
#include <pacer/hooks/hook.h>
#include <pacer/hooks/length_buckets.h>
#include <pacer/hooks/once_on_first_rank.h>
#include <pacer/hooks/precision.h>
#include <pacer/hooks/progress.h>
#include <pacer/hooks/recompute.h>
#include <pacer/hooks/session_parts.h>
#include <pacer/hooks/sharded_state.h>
#include <pacer/hooks/step_report.h>
#include <pacer/hooks/update_batch_norm.h>
#include <pacer/hooks/weight_average.h>
