// The ranks of a run and what they can do together: everything of this folder.
#pragma once

#include <pacer/collectives/agreement.h>
#include <pacer/collectives/communication_error.h>
#include <pacer/collectives/communicator.h>
#include <pacer/collectives/gradient_bucketer.h>
#include <pacer/collectives/gradient_scope.h>
#include <pacer/collectives/grid.h>
#include <pacer/collectives/launch_environment.h>
#include <pacer/collectives/message.h>
#include <pacer/collectives/parameter_range.h>
