/* Copies between memory of the caller and a mapping of a file that another process may shrink at any moment. */
#ifndef TANDEM_MEMORY_H
#define TANDEM_MEMORY_H

#include "tandem.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Copies `size` bytes, which do not overlap. Returns 0, or 1 if a page of either side has gone: then some bytes are
 * copied and others are not. The first call installs a handler of SIGBUS; faults of other code go to the one before. A
 * handler that is installed later takes its place, and a fault of a copy is then that handler's. */
TANDEM_API int tandem_memory_copy(void* to, const void* from, size_t size);

#ifdef __cplusplus
}
#endif

#endif
