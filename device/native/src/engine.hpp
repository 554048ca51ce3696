// An open engine file: mapped, its header and manifest checked.
#pragma once
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "manifest.hpp"

namespace tandem::internal {

// A mapped file. Another program that shortens it in place ends this process with SIGBUS.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path);  // throws EngineError
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::string_view bytes() const { return {data_, size_}; }

 private:
  const char* data_ = nullptr;
  std::size_t size_ = 0;
};

class Engine {
 public:
  explicit Engine(std::string path);  // throws EngineError

  const std::string& path() const { return path_; }
  const Manifest& manifest() const { return manifest_; }
  const Container& container() const { return container_; }
  const Facts& facts() const { return *facts_; }

  // The bytes of an entry, checked against their checksum at the first call. Throws EngineError.
  std::string_view section(const std::string& name);
  void verify();

 private:
  void check(const Entry& entry);

  std::string path_;
  MappedFile file_;
  Container container_;
  Manifest manifest_;
  std::unique_ptr<Facts> facts_;
  std::mutex mutex_;
  std::vector<bool> checked_;
};

}  // namespace tandem::internal
