#include "engine.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace tandem::internal {

MappedFile::MappedFile(const std::string& path) {
  // Without O_NONBLOCK a FIFO would wait for a writer.
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) refuse(path, " cannot be read: ", std::strerror(errno));
  struct stat status = {};
  const bool known = ::fstat(file, &status) == 0;
  void* data = MAP_FAILED;
  if (known && S_ISREG(status.st_mode) && status.st_size > 0)
    data = ::mmap(nullptr, static_cast<std::size_t>(status.st_size), PROT_READ, MAP_SHARED, file, 0);
  const int error = errno;
  ::close(file);
  if (known && !S_ISREG(status.st_mode)) refuse(path, " cannot be read: it is no regular file");
  if (known && status.st_size == 0) refuse(path, " is empty; copy or build it again");
  if (data == MAP_FAILED) refuse(path, " cannot be read: ", std::strerror(error));
  data_ = static_cast<const char*>(data);
  size_ = static_cast<std::size_t>(status.st_size);
}

MappedFile::~MappedFile() { ::munmap(const_cast<char*>(data_), size_); }

Engine::Engine(std::string path) : path_(std::move(path)), file_(path_) {
  try {
    container_ = read_container(file_.bytes());
    manifest_ = read_manifest(container_.manifest);
    check_manifest(manifest_, container_);
  } catch (const EngineError& error) {
    refuse(path_, ": ", error.what(), "; copy or build it again");
  }
  facts_ = std::make_unique<Facts>(manifest_, container_);
  checked_.resize(container_.entries.size());
}

void Engine::check(const Entry& entry) {
  const auto index = static_cast<std::size_t>(&entry - container_.entries.data());
  const std::lock_guard lock(mutex_);
  if (checked_[index]) return;
  try {
    check_section(container_, entry, file_.bytes());
  } catch (const EngineError& error) {
    refuse(path_, ": ", error.what(), "; copy or build it again");
  }
  checked_[index] = true;
}

std::string_view Engine::section(const std::string& name) {
  const Entry* entry = container_.find(name);
  if (entry == nullptr) refuse(path_, " has no entry ", quoted(name), "; build it again");
  check(*entry);
  return file_.bytes().substr(container_.data_start + static_cast<std::size_t>(entry->start),
                              static_cast<std::size_t>(entry->bytes()));
}

void Engine::verify() {
  for (const Entry& entry : container_.entries) check(entry);
}

}  // namespace tandem::internal
