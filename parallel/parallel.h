// Everything of parallel: the ways in which ranks train one model together.
#pragma once

#include <pacer/parallel/convert_sync_batch_norm.h>
#include <pacer/parallel/data_parallel.h>
#include <pacer/parallel/parallel_training.h>
#include <pacer/parallel/parameter_shards.h>
#include <pacer/parallel/pipeline.h>
#include <pacer/parallel/pipeline_balance.h>
#include <pacer/parallel/pipeline_cut.h>
#include <pacer/parallel/pipeline_options.h>
#include <pacer/parallel/pipeline_plan.h>
#include <pacer/parallel/pipeline_simulation.h>
#include <pacer/parallel/shard_layout.h>
#include <pacer/parallel/shards.h>
#include <pacer/parallel/training_memory.h>
