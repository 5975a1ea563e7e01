// Everything of schedulers: the Session, its hooks, and the pure functions under them.
#pragma once

#include <pacer/schedulers/batch.h>
#include <pacer/schedulers/checkpoints.h>
#include <pacer/schedulers/cuda_graph.h>
#include <pacer/schedulers/data_parallel.h>
#include <pacer/schedulers/epoch_sampler.h>
#include <pacer/schedulers/factor_lr.h>
#include <pacer/schedulers/gradient_accumulation.h>
#include <pacer/schedulers/gradient_clipping.h>
#include <pacer/schedulers/hook.h>
#include <pacer/schedulers/layer_drop.h>
#include <pacer/schedulers/layer_drop_rule.h>
#include <pacer/schedulers/layer_drop_sequential.h>
#include <pacer/schedulers/learning_rate.h>
#include <pacer/schedulers/learning_rate_schedule.h>
#include <pacer/schedulers/length_schedule.h>
#include <pacer/schedulers/load_weights.h>
#include <pacer/schedulers/metrics.h>
#include <pacer/schedulers/precision.h>
#include <pacer/schedulers/progress.h>
#include <pacer/schedulers/progress_bar.h>
#include <pacer/schedulers/sequence_length.h>
#include <pacer/schedulers/session.h>
#include <pacer/schedulers/session_parts.h>
#include <pacer/schedulers/step_report.h>
