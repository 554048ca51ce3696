/* A double of libcuda.so.1: one integrated GPU of compute capability 8.7, whose memory is the CPU's.
 * Copies are made at once, kernels compute nothing. Fuzzers and checkers of memory and threads use it. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { OK, OUT_OF_MEMORY = 2, MAX_BYTES = 1 << 24, INTEGRATED = 18, MAJOR = 75, MINOR = 76, DRIVER = 12060 };

static int take(void** place, size_t bytes) {
  *place = bytes <= MAX_BYTES ? calloc(bytes, 1) : NULL;
  return *place == NULL ? OUT_OF_MEMORY : OK;
}
static int put_back(void* place) {
  free(place);
  return OK;
}
static int copied(void* target, const void* source, size_t bytes) {
  memmove(target, source, bytes);
  return OK;
}

/* Handles are memory, too: one that is not given back is a leak, one given back twice an error. */
#define TAKES(name) int name(void** handle) { return take(handle, 1); }
#define GIVES_BACK(name) int name(void* handle) { return put_back(handle); }
#define DOES_NOTHING(name) int name(void) { return OK; }

TAKES(cuModuleLoadData) TAKES(cuStreamCreate) TAKES(cuEventCreate) TAKES(cuGraphInstantiateWithFlags)
GIVES_BACK(cuModuleUnload) GIVES_BACK(cuStreamDestroy_v2) GIVES_BACK(cuEventDestroy_v2)
GIVES_BACK(cuGraphExecDestroy) GIVES_BACK(cuGraphDestroy) GIVES_BACK(cuMemFree_v2) GIVES_BACK(cuMemFreeHost)
DOES_NOTHING(cuInit) DOES_NOTHING(cuDevicePrimaryCtxRelease_v2) DOES_NOTHING(cuCtxSetCurrent)
DOES_NOTHING(cuFuncSetAttribute) DOES_NOTHING(cuStreamSynchronize) DOES_NOTHING(cuEventRecord)
DOES_NOTHING(cuEventSynchronize) DOES_NOTHING(cuStreamWaitEvent) DOES_NOTHING(cuStreamBeginCapture_v2)
DOES_NOTHING(cuGraphLaunch) DOES_NOTHING(cuLaunchKernel) DOES_NOTHING(cuLaunchKernelEx)

int cuDriverGetVersion(int* version) { return *version = DRIVER, OK; }
int cuDeviceGetCount(int* count) { return *count = 1, OK; }
int cuDeviceGetName(char* name, int size) { return strncpy(name, "double", (size_t)size), OK; }
int cuDeviceGetAttribute(int* value, int attribute) {
  *value = attribute == MAJOR ? 8 : attribute == MINOR ? 7 : attribute == INTEGRATED;
  return OK;
}
int cuDevicePrimaryCtxRetain(void** context) { return *context = NULL, OK; }
int cuCtxGetCurrent(void** context) { return *context = NULL, OK; }
int cuModuleGetFunction(void** function, void* module) { return *function = module, OK; }
int cuStreamEndCapture(void* stream, void** graph) { return (void)stream, take(graph, 1); }
int cuMemAlloc_v2(void** address, size_t bytes) { /* at a multiple of 256, as documented */
  const size_t rounded = (bytes + 255) / 256 * 256;
  *address = bytes <= MAX_BYTES ? aligned_alloc(256, rounded) : NULL;
  return *address == NULL ? OUT_OF_MEMORY : (memset(*address, 0, rounded), OK);
}
int cuMemHostAlloc(void** address, size_t bytes) { return take(address, bytes); }
int cuMemHostGetDevicePointer_v2(void** address, void* host) { return *address = host, OK; }
int cuMemsetD8_v2(void* target, unsigned char value, size_t bytes) { return memset(target, value, bytes), OK; }
int cuMemcpyHtoD_v2(void* target, const void* source, size_t bytes) { return copied(target, source, bytes); }
int cuMemcpyHtoDAsync_v2(void* target, const void* source, size_t bytes) { return copied(target, source, bytes); }
int cuMemcpyDtoHAsync_v2(void* target, const void* source, size_t bytes) { return copied(target, source, bytes); }
int cuMemcpyDtoDAsync_v2(void* target, const void* source, size_t bytes) { return copied(target, source, bytes); }
int cuGetErrorString(int status, const char** text) { return *text = status ? "out of memory" : "none", OK; }
