// The functions of libcuda that are called, found when the first segment for a GPU is loaded.
#pragma once
#include <cstddef>
#include <cstdint>

#include "text.hpp"

namespace tandem::internal::cuda {

using Handle = void*;
using Address = std::uint64_t;

// CUlaunchAttribute and CUlaunchConfig of the CUDA Driver API reference.
struct LaunchAttribute {
  unsigned id, pad;
  int value;
  char rest[60];
};

struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  Handle stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};

// Each row: the member, the library's name, the arguments. All are there since CUDA 11.4, which every
// JetPack from 5 on has.
#define TANDEM_CUDA_CALLS(row)                                                                             \
  row(init, "cuInit", unsigned)                                                                            \
  row(driver_version, "cuDriverGetVersion", int*)                                                          \
  row(device_count, "cuDeviceGetCount", int*)                                                              \
  row(device_name, "cuDeviceGetName", char*, int, int)                                                     \
  row(device_attribute, "cuDeviceGetAttribute", int*, int, int)                                            \
  row(retain_context, "cuDevicePrimaryCtxRetain", Handle*, int)                                            \
  row(release_context, "cuDevicePrimaryCtxRelease_v2", int)                                                \
  row(current_context, "cuCtxGetCurrent", Handle*)                                                         \
  row(make_current, "cuCtxSetCurrent", Handle)                                                             \
  row(load_module, "cuModuleLoadData", Handle*, const void*)                                               \
  row(find_function, "cuModuleGetFunction", Handle*, Handle, const char*)                                  \
  row(unload_module, "cuModuleUnload", Handle)                                                             \
  row(set_function_attribute, "cuFuncSetAttribute", Handle, int, int)                                      \
  row(allocate, "cuMemAlloc_v2", Address*, std::size_t)                                                    \
  row(free, "cuMemFree_v2", Address)                                                                       \
  row(allocate_host, "cuMemHostAlloc", void**, std::size_t, unsigned)                                      \
  row(mapped_address, "cuMemHostGetDevicePointer_v2", Address*, void*, unsigned)                           \
  row(free_host, "cuMemFreeHost", void*)                                                                   \
  row(fill, "cuMemsetD8_v2", Address, unsigned char, std::size_t)                                          \
  row(upload_now, "cuMemcpyHtoD_v2", Address, const void*, std::size_t)                                    \
  row(upload, "cuMemcpyHtoDAsync_v2", Address, const void*, std::size_t, Handle)                           \
  row(download, "cuMemcpyDtoHAsync_v2", void*, Address, std::size_t, Handle)                               \
  row(copy, "cuMemcpyDtoDAsync_v2", Address, Address, std::size_t, Handle)                                 \
  row(create_stream, "cuStreamCreate", Handle*, unsigned)                                                  \
  row(destroy_stream, "cuStreamDestroy_v2", Handle)                                                        \
  row(synchronize, "cuStreamSynchronize", Handle)                                                          \
  row(create_event, "cuEventCreate", Handle*, unsigned)                                                    \
  row(destroy_event, "cuEventDestroy_v2", Handle)                                                          \
  row(record_event, "cuEventRecord", Handle, Handle)                                                       \
  row(wait_event, "cuEventSynchronize", Handle)                                                            \
  row(stream_wait_event, "cuStreamWaitEvent", Handle, Handle, unsigned)                                    \
  row(begin_capture, "cuStreamBeginCapture_v2", Handle, int)                                               \
  row(end_capture, "cuStreamEndCapture", Handle, Handle*)                                                  \
  row(instantiate, "cuGraphInstantiateWithFlags", Handle*, Handle, unsigned long long)                     \
  row(launch_graph, "cuGraphLaunch", Handle, Handle)                                                       \
  row(destroy_executable, "cuGraphExecDestroy", Handle)                                                    \
  row(destroy_graph, "cuGraphDestroy", Handle)                                                             \
  row(launch, "cuLaunchKernel", Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,        \
      unsigned, Handle, void**, void**)

inline constexpr int kIntegrated = 18;  // CUdevice_attribute: the GPU shares its memory with the CPU
inline constexpr int kComputeMajor = 75;
inline constexpr int kComputeMinor = 76;
inline constexpr int kMaxDynamicSharedBytes = 8;  // CUfunction_attribute
inline constexpr unsigned kHostAllocMapped = 2;
inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr int kCaptureRelaxed = 2;
inline constexpr unsigned kProgrammaticStreamSerialization = 6;

class Driver {
 public:
#define TANDEM_CUDA_MEMBER(member, name, ...) int (*member)(__VA_ARGS__) = nullptr;
  TANDEM_CUDA_CALLS(TANDEM_CUDA_MEMBER)
#undef TANDEM_CUDA_MEMBER
  // Null where graphs cannot have kernels that start early: before CUDA 12.3.
  int (*launch_early)(const LaunchConfig*, Handle, void**, void**) = nullptr;

  // Throws SessionError with the driver's words unless the status is 0.
  void check(int status, const char* what) const;
  int attribute(int number) const;
  // The architecture of the first GPU: 87 is compute capability 8.7.
  int sm() const { return attribute(kComputeMajor) * 10 + attribute(kComputeMinor); }
  std::string gpu_name() const;

  // Loads and starts the driver once. Throws SessionError: there is none, or no GPU.
  static const Driver& get();

 private:
  explicit Driver(Handle library);
  int (*error_text_)(int, const char**) = nullptr;
};

// The primary context, current until the end of a block; then the caller's is.
class CurrentContext {
 public:
  explicit CurrentContext(const Driver& driver);  // throws SessionError
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  const Driver& driver_;
  Handle callers_ = nullptr;
};

// The end of the last inference that was enqueued: the next one uses the same memory. The primary
// context is current in every call.
class Fence {
 public:
  Fence();  // throws SessionError
  ~Fence();
  Fence(const Fence&) = delete;
  Fence& operator=(const Fence&) = delete;

  void precede(Handle stream);  // what is enqueued in the stream from now on
  void record(Handle stream);
  void wait();

 private:
  const Driver& driver_;
  Handle event_ = nullptr;
  bool recorded_ = false;
};

}  // namespace tandem::internal::cuda
