// CRC-32 (IEEE 802.3, reflected polynomial 0xedb88320), the value of zlib's crc32(): it names a tokenizer file in the
// header of the shards made with it.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

// Of one byte: crc_table()[b] is the remainder of b * x^32.
constexpr std::array<uint32_t, 256> crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t b = 0; b < 256; b++) {
    uint32_t r = b;
    for (int bit = 0; bit < 8; bit++) r = (r >> 1) ^ ((r & 1) ? 0xedb88320u : 0);
    table[b] = r;
  }
  return table;
}

// The CRC of n bytes; to go on from an earlier part, give that part's CRC.
inline uint32_t crc32(const void* data, size_t n, uint32_t crc = 0) {
  static constexpr std::array<uint32_t, 256> table = crc_table();
  const auto* p = static_cast<const uint8_t*>(data);
  crc = ~crc;
  for (size_t i = 0; i < n; i++) crc = (crc >> 8) ^ table[(crc ^ p[i]) & 0xff];
  return ~crc;
}
