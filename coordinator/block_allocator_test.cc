#include "coordinator/block_allocator.h"
