// Everything of session: the Session, and what it measures and decides while training goes on.
#pragma once

#include <pacer/session/early_stopping.h>
#include <pacer/session/resume_together.h>
#include <pacer/session/save_best.h>
#include <pacer/session/session.h>
#include <pacer/session/validation.h>
