// SHA-256 (FIPS 180-4), by which finished plans are named and checked.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace tandem::internal {

class Sha256 {
 public:
  void update(std::string_view bytes);
  std::string hex();  // at the end

 private:
  void block(const unsigned char* bytes);

  std::array<std::uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::string rest_;  // less than a block
  std::uint64_t bytes_ = 0;
};

}  // namespace tandem::internal
