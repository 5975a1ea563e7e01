// Collectives that send less than they reduce: everything of this folder.
#pragma once

#include <pacer/compression/compressed_all_reduce.h>
#include <pacer/compression/compression_options.h>
