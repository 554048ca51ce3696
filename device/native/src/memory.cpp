// A copy that outlives SIGBUS: what the kernel sends where a mapping has a page that its file has no more.
#include "tandem_memory.h"

#include <csetjmp>
#include <csignal>
#include <cstring>

#include <atomic>

namespace {

// Where the copy of this thread goes on after a fault. Memory of its own in each thread from the start, 8 bytes of the
// loader's static room: a handler may not allocate.
__attribute__((tls_model("initial-exec"))) thread_local sigjmp_buf* volatile fault_exit = nullptr;
struct sigaction former;

void on_fault(int number, siginfo_t* fault, void* context) {
  if (fault_exit != nullptr && fault->si_code > 0) siglongjmp(*fault_exit, 1);  // not sent by a process
  if ((former.sa_flags & SA_SIGINFO) != 0) {
    former.sa_sigaction(number, fault, context);
  } else if (former.sa_handler != SIG_DFL && former.sa_handler != SIG_IGN) {
    former.sa_handler(number);
  } else if (former.sa_handler == SIG_IGN && fault->si_code <= 0) {
    return;  // sent by a process, and ignored as before
  } else {
    sigaction(number, &former, nullptr);  // the instruction runs again, and faults again
    if (fault->si_code <= 0) raise(number);  // sent by a process: no instruction
  }
}

bool install() {
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  // A jump out of the handler leaves the signal free; handlers of others may want their own stack.
  action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  // The former one is known before the first fault.
  return sigaction(SIGBUS, nullptr, &former) == 0 && sigaction(SIGBUS, &action, nullptr) == 0;
}

}  // namespace

int tandem_memory_copy(void* to, const void* from, std::size_t size) {
  static const bool installed = install();
  if (!installed) return 1;
  sigjmp_buf here;
  if (sigsetjmp(here, 0) != 0) {
    fault_exit = nullptr;
    return 1;
  }
  fault_exit = &here;
  std::atomic_signal_fence(std::memory_order_seq_cst);
  std::memcpy(to, from, size);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  fault_exit = nullptr;
  return 0;
}
