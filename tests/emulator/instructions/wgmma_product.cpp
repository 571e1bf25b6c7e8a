// What one warp of a wgmma does: reads the operands that descriptors or registers give, and adds their product.
#include "wgmma.h"

#include "access.h"
#include "rounding.h"
#include "tensor_map.h"

#include "../machine/async_copy.h"

namespace emulator {

namespace {

// A descriptor, and the address of element (mn, k) of 16 bits that it describes. In units of 16 bytes = 8 elements:
//   K-major, no swizzle:  (mn%8) + SBO (mn/8) + LBO (k/8)                 rows of 16 bytes
//   K-major, swizzled:    rows of the swizzle's width, SBO (mn/8), k along the row
//   MN-major, no swizzle: (k%8) + LBO (k/8) + SBO (mn/8)
//   MN-major, swizzled:   rows (k%8) of the swizzle's width along mn, SBO (k/8), LBO from one width to the next
struct Descriptor {
  uint32_t start, lead, stride;
  int swizzle;  // mode as in tensor maps: 0 none, 1, 2, 3: 32, 64, 128 bytes

  explicit Descriptor(uint64_t bits)
      : start((bits & 0x3fff) << 4), lead((bits >> 16 & 0x3fff) << 4), stride((bits >> 32 & 0x3fff) << 4) {
    constexpr int modes[] = {0, 3, 2, 1};
    swizzle = modes[bits >> 62];
    if (bits >> 49 & 7) throw Fault("wgmma: descriptors with a base offset are not modelled");
  }
  uint32_t address(int mn, int k, bool mn_major) const {
    uint32_t at;
    if (!swizzle) {
      at = mn_major ? (mn % 8) * 2 + (k % 8) * 16 + (k / 8) * lead + (mn / 8) * stride
                    : (k % 8) * 2 + (mn % 8) * 16 + (mn / 8) * stride + (k / 8) * lead;
    } else {
      const uint32_t width = 16u << swizzle, elements = width / 2;
      at = mn_major ? (mn % elements) * 2 + (mn / elements) * lead + (k % 8) * width + (k / 8) * stride
                    : k * 2 + (mn % 8) * width + (mn / 8) * stride;
    }
    return swizzle_address(start + at, swizzle);
  }
};

float read_element(const Matrix& m, const Descriptor& d, int mn, int k, bool mn_major, int bytes, int input) {
  if (bytes == 2) {
    uint16_t bits;
    const uint8_t* at = m.block->shared.async_read(m.warp->index, d.address(mn, k, mn_major), 2);
    std::memcpy(&bits, at, 2);
    return input == 0 ? from_half(bits) : from_bfloat(bits);
  }
  // 32-bit elements are K-major only: two 16-bit columns each
  uint32_t bits;
  std::memcpy(&bits, m.block->shared.async_read(m.warp->index, d.address(mn, 2 * k, false), 4), 4);
  return std::bit_cast<float>(bits & 0xffffe000);
}

}  // namespace

void read_operands(const Matrix& m, float (&a)[16][16], std::vector<float>& b) {
  const Instruction& in = *m.in;
  const int n_size = static_cast<int>(in.value[0]), k_size = static_cast<int>(in.value[3]),
            input = static_cast<int>(in.value[1]);
  const int bytes = input == 2 ? 4 : 2, row = 16 * (m.warp->index % 4);
  if (in.value[2] & 1) {
    for (int lane = 0; lane < 32; ++lane)
      for (int r = 0; r < 4; ++r) {
        uint32_t word;
        std::memcpy(&word, m.registers + in.list_b[r].offset + 4 * lane, 4);
        const int i = lane / 4 + 8 * (r % 2);
        if (bytes == 4) {
          a[i][lane % 4 + 4 * (r / 2)] = std::bit_cast<float>(word & 0xffffe000);
        } else {
          for (int part = 0; part < 2; ++part) {
            const auto bits = static_cast<uint16_t>(word >> 16 * part);
            a[i][2 * (lane % 4) + part + 8 * (r / 2)] = input == 0 ? from_half(bits) : from_bfloat(bits);
          }
        }
      }
  } else {
    const Descriptor d(m.a);
    for (int i = 0; i < 16; ++i)
      for (int k = 0; k < k_size; ++k) a[i][k] = read_element(m, d, row + i, k, in.value[2] & 2, bytes, input);
  }
  const Descriptor d(m.b);
  b.resize(k_size * n_size);
  for (int k = 0; k < k_size; ++k)
    for (int n = 0; n < n_size; ++n) b[k * n_size + n] = read_element(m, d, n, k, in.value[2] & 4, bytes, input);
}

// The shared memory that an instruction reads, as runs of bytes.
void hold_operands(const Matrix& m, std::vector<std::pair<uint32_t, int>>& held) {
  const Instruction& in = *m.in;
  const int bytes = in.value[1] == 2 ? 4 : 2;
  auto add = [&](uint64_t bits, int first, int count, bool mn_major) {
    const Descriptor d(bits);
    for (int mn = first; mn < first + count; ++mn)
      for (int k = 0; k < in.value[3]; ++k) {
        const uint32_t at = d.address(mn, k * bytes / 2, mn_major);
        m.block->shared.hold(at, bytes, 1);
        if (!held.empty() && held.back().first + held.back().second == at)
          held.back().second += bytes;
        else
          held.emplace_back(at, bytes);
      }
  };
  if (!(in.value[2] & 1)) add(m.a, 16 * (m.warp->index % 4), 16, in.value[2] & 2);
  add(m.b, 0, static_cast<int>(in.value[0]), in.value[2] & 4);
}

void carry_out(const Matrix& m) {
  const Instruction& in = *m.in;
  const int n_size = static_cast<int>(in.value[0]), k_size = static_cast<int>(in.value[3]);
  float a[16][16];
  std::vector<float> b;
  read_operands(m, a, b);
  const float sign = ((in.value[2] & 8) != 0) != ((in.value[2] & 16) != 0) ? -1.0f : 1.0f;
  std::vector<float> sum(16 * n_size);
  for (int i = 0; i < 16; ++i)
    for (int k = 0; k < k_size; ++k)
      for (int n = 0; n < n_size; ++n) sum[i * n_size + n] += a[i][k] * b[k * n_size + n];
  for (size_t r = 0; r < in.list.size(); ++r) {
    auto* d = reinterpret_cast<float*>(m.warp->async->accumulators.data() + in.list[r].offset);
    for (int lane = 0; lane < 32; ++lane) {
      const int row = lane / 4 + 8 * (r / 2 % 2), column = 8 * static_cast<int>(r / 4) + 2 * (lane % 4) + r % 2;
      const float value = sign * sum[row * n_size + column];
      d[lane] = m.accumulate ? d[lane] + value : value;
    }
  }
}

}  // namespace emulator
