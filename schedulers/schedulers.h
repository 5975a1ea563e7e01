// Everything of schedulers: how learning rate, other numbers, sequence length and depth change over a training.
#pragma once

#include <pacer/schedulers/factor_lr.h>
#include <pacer/schedulers/layer_drop.h>
#include <pacer/schedulers/layer_drop_rule.h>
#include <pacer/schedulers/layer_drop_sequential.h>
#include <pacer/schedulers/learning_rate.h>
#include <pacer/schedulers/learning_rate_schedule.h>
#include <pacer/schedulers/length_schedule.h>
#include <pacer/schedulers/sequence_length.h>
#include <pacer/schedulers/vary.h>
#include <pacer/schedulers/window_length.h>
