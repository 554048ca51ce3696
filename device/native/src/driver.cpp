#include "driver.hpp"

#include <dlfcn.h>

namespace tandem::internal::cuda {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";
constexpr int kEarlyVersion = 12030;  // CUDA Programming Guide, "CUDA Graphs", edge data

template <typename Function>
void find(Handle library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  if (function == nullptr) refuse_session(kLibrary, " lacks ", name, "; update the NVIDIA driver");
}

}  // namespace

Driver::Driver(Handle library) {
  find(library, "cuGetErrorString", error_text_);
#define TANDEM_CUDA_FIND(member, name, ...) find(library, name, member);
  TANDEM_CUDA_CALLS(TANDEM_CUDA_FIND)
#undef TANDEM_CUDA_FIND
  check(init(0), "cuInit");
  int version = 0, devices = 0;
  check(driver_version(&version), "cuDriverGetVersion");
  if (version >= kEarlyVersion) find(library, "cuLaunchKernelEx", launch_early);
  check(device_count(&devices), "cuDeviceGetCount");
  if (devices == 0) refuse_session("there is no NVIDIA GPU here");
}

const Driver& Driver::get() {
  static const Driver& driver = *[] {
    Handle library = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) refuse_session("there is no NVIDIA driver here (", kLibrary, " cannot be loaded)");
    return new Driver(library);
  }();
  return driver;
}

void Driver::check(int status, const char* what) const {
  if (status == 0) return;
  const char* text = nullptr;
  error_text_(status, &text);
  refuse_session(what, " failed: ", text == nullptr ? "unknown error" : text, " (CUDA error ", status, ")");
}

int Driver::attribute(int number) const {
  int value = 0;
  check(device_attribute(&value, number, 0), "cuDeviceGetAttribute");
  return value;
}

std::string Driver::gpu_name() const {
  char name[256] = "";
  check(device_name(name, sizeof name, 0), "cuDeviceGetName");
  return name;
}

CurrentContext::CurrentContext(const Driver& driver) : driver_(driver) {
  driver.check(driver.current_context(&callers_), "cuCtxGetCurrent");
  Handle primary = nullptr;
  driver.check(driver.retain_context(&primary, 0), "cuDevicePrimaryCtxRetain");
  const int status = driver.make_current(primary);
  if (status != 0) driver.release_context(0);
  driver.check(status, "cuCtxSetCurrent");
}

CurrentContext::~CurrentContext() {
  driver_.make_current(callers_);
  driver_.release_context(0);
}

Fence::Fence() : driver_(Driver::get()) {
  driver_.check(driver_.create_event(&event_, kEventDisableTiming), "cuEventCreate");
}

Fence::~Fence() { driver_.destroy_event(event_); }

void Fence::precede(Handle stream) {
  if (recorded_) driver_.check(driver_.stream_wait_event(stream, event_, 0), "cuStreamWaitEvent");
}

void Fence::record(Handle stream) {
  recorded_ = true;
  driver_.check(driver_.record_event(event_, stream), "cuEventRecord");
}

void Fence::wait() {
  if (recorded_) driver_.check(driver_.wait_event(event_), "cuEventSynchronize");
}

}  // namespace tandem::internal::cuda
