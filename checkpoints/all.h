// Everything of checkpoints: runs on the disk and back, and weights alone.
#pragma once

#include <pacer/checkpoints/adapter_files.h>
#include <pacer/checkpoints/causal_lm_files.h>
#include <pacer/checkpoints/checkpoints.h>
#include <pacer/checkpoints/load_blocks.h>
#include <pacer/checkpoints/load_weights.h>
#include <pacer/checkpoints/mean_weights.h>
#include <pacer/checkpoints/save_weights.h>
