// A copy that outlives SIGBUS: what the kernel sends where a mapping has a page that its file has no more.
#include "tandem_memory.h"

#include <csetjmp>
#include <csignal>
#include <cstring>

#include <atomic>

namespace {

// Where the copy of this thread goes on after a fault. Memory of its own in each thread from the start: a handler may
// not allocate.
__attribute__((tls_model("initial-exec"))) thread_local sigjmp_buf* volatile fault_exit = nullptr;
struct sigaction former;

void on_fault(int number, siginfo_t* fault, void* context) {
  if (fault_exit != nullptr) siglongjmp(*fault_exit, 1);
  if ((former.sa_flags & SA_SIGINFO) != 0) {
    former.sa_sigaction(number, fault, context);
  } else if (former.sa_handler != SIG_DFL && former.sa_handler != SIG_IGN) {
    former.sa_handler(number);
  } else {
    sigaction(number, &former, nullptr);  // the instruction runs again, and faults again
    if (fault->si_code <= 0) raise(number);  // sent by a process: no instruction
  }
}

bool install() {
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;  // a jump out of the handler leaves the signal free
  return sigaction(SIGBUS, &action, &former) == 0;
}

}  // namespace

int tandem_memory_copy(void* to, const void* from, std::size_t size) {
  static const bool installed = install();
  if (!installed) return 1;
  sigjmp_buf here;
  const bool faulted = sigsetjmp(here, 0) != 0;
  if (!faulted) {
    fault_exit = &here;
    std::atomic_signal_fence(std::memory_order_seq_cst);
    std::memcpy(to, from, size);
    std::atomic_signal_fence(std::memory_order_seq_cst);
  }
  fault_exit = nullptr;
  return faulted ? 1 : 0;
}
