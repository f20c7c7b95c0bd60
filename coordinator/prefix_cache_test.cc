#include "coordinator/prefix_cache.h"
