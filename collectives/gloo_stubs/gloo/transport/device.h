// Everything is declared there.
#pragma once

#include <gloo/context.h>
