// CRC-32 (IEEE 802.3, reflected polynomial 0xedb88320), the value of zlib's crc32(): it names a tokenizer file in the
// header of the shards made with it, and guards the files of a checkpoint.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

// crc_tables()[k][b]: the remainder of byte b followed by k zero bytes.
constexpr std::array<std::array<uint32_t, 256>, 8> crc_tables() {
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t b = 0; b < 256; b++) {
    uint32_t r = b;
    for (int bit = 0; bit < 8; bit++) r = (r >> 1) ^ ((r & 1) ? 0xedb88320u : 0);
    tables[0][b] = r;
  }
  for (size_t k = 1; k < tables.size(); k++)
    for (size_t b = 0; b < 256; b++) tables[k][b] = (tables[k - 1][b] >> 8) ^ tables[0][tables[k - 1][b] & 0xff];
  return tables;
}

// The CRC of n bytes; to go on from an earlier part, give that part's CRC. Eight bytes at a time, a table for each
// place (Kounavis and Berry, "Novel table lookup-based algorithms for high-performance CRC generation", 2008).
inline uint32_t crc32(const void* data, size_t n, uint32_t crc = 0) {
  static constexpr auto tables = crc_tables();
  const auto* p = static_cast<const uint8_t*>(data);
  crc = ~crc;
  for (; n >= 8; p += 8, n -= 8) {
    const uint32_t first = crc ^ (p[0] | p[1] << 8 | p[2] << 16 | static_cast<uint32_t>(p[3]) << 24);
    crc = tables[7][first & 0xff] ^ tables[6][first >> 8 & 0xff] ^ tables[5][first >> 16 & 0xff] ^
          tables[4][first >> 24] ^ tables[3][p[4]] ^ tables[2][p[5]] ^ tables[1][p[6]] ^ tables[0][p[7]];
  }
  for (; n > 0; p++, n--) crc = (crc >> 8) ^ tables[0][(crc ^ *p) & 0xff];
  return ~crc;
}
