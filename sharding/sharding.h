// Everything of sharding: parameters of which each rank updates a part.
#pragma once

#include <pacer/sharding/parameter_shards.h>
#include <pacer/sharding/shard_layout.h>
