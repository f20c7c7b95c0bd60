#include "coordinator/scheduler.h"
