// The operations of warp collectives, each made once for all lanes by the last lane to arrive.
#include <algorithm>
#include <bit>

#include "dev/tests/simt/engine.h"

namespace simt {
namespace {

template <class Body>
void each_lane(const Warp& warp, Body body) {
  for (unsigned lanes = warp.arrived; lanes; lanes &= lanes - 1) {
    const int lane = std::countr_zero(lanes);
    body(lane, *warp.lanes[lane].call);
  }
}

// The lane that `lane` reads in a shuffle, or itself where the source leaves its segment (PTX "shfl.sync", with the
// clamp and segment mask that CUDA makes from `width`).
int shuffle_source(const Collective& c, int lane) {
  const int segment = lane & ~(c.width - 1);  // first lane of the segment
  const int last = segment | (c.width - 1);
  int source = lane;
  switch (c.op) {
    case Op::shfl: return segment | (c.argument & (c.width - 1));
    case Op::shfl_up: source = lane - c.argument; return source >= segment ? source : lane;
    case Op::shfl_down: source = lane + c.argument; return source <= last ? source : lane;
    default: source = lane ^ c.argument; return source <= last ? source : lane;
  }
}

void perform_shuffle(const Warp& warp) {
  each_lane(warp, [&](int lane, Collective& c) {
    if (c.width < 1 || c.width > 32 || !std::has_single_bit(static_cast<unsigned>(c.width)))
      fail("%s at %s: width %d is no power of two up to 32", c.name, place(c.site).c_str(), c.width);
    const int source = shuffle_source(c, lane);
    if (source < 0 || source > 31 || !(warp.live >> source & 1))
      fail("%s at %s: lane %d reads lane %d, which is not alive", c.name, place(c.site).c_str(), lane, source);
    const void* in = warp.lanes[source].call->in;
    if (c.bytes == 4) *static_cast<any_u32*>(c.out) = *static_cast<const any_u32*>(in);
    else *static_cast<any_u64*>(c.out) = *static_cast<const any_u64*>(in);
  });
}

void perform_vote(const Warp& warp, Op op) {
  unsigned ballot = 0;
  each_lane(warp, [&](int lane, Collective& c) { ballot |= (*static_cast<const int*>(c.in) != 0) * (1u << lane); });
  const unsigned result = op == Op::ballot ? ballot : op == Op::any ? ballot != 0 : ballot == warp.live;
  each_lane(warp, [&](int, Collective& c) { *static_cast<unsigned*>(c.out) = result; });
}

void perform_reduction(const Warp& warp, const Collective& first) {
  // Wide enough for both kinds of number; sums wrap as on hardware.
  const auto value = [&](const Collective& c) {
    return first.number == Number::i32 ? int64_t{*static_cast<const int*>(c.in)}
                                       : int64_t{*static_cast<const unsigned*>(c.in)};
  };
  int64_t result = value(first);
  if (first.op == Op::add) result = 0;
  each_lane(warp, [&](int, Collective& c) {
    const int64_t x = value(c);
    result = first.op == Op::add ? result + x : first.op == Op::min ? std::min(result, x) : std::max(result, x);
  });
  each_lane(warp, [&](int, Collective& c) { *static_cast<unsigned*>(c.out) = static_cast<unsigned>(result); });
}

void perform_ldmatrix(const Warp& warp, const Collective& first) {
  const int tiles = first.argument;
  const bool transposed = static_cast<const TileRow*>(first.in)->transposed;
  const char* rows[32];
  for (int i = 0; i < 8 * tiles; i++) {
    const Collective& c = *warp.lanes[i].call;
    rows[i] = static_cast<const char*>(shared_row(static_cast<const TileRow*>(c.in)->address, c.name, c.site));
  }
  for (int m = 0; m < tiles; m++) {
    int used[8] = {};
    for (int i = 0; i < 8; i++) used[static_cast<const TileRow*>(warp.lanes[8 * m + i].call->in)->address / 16 % 8]++;
    engine.counters.conflicts += static_cast<uint64_t>(*std::max_element(used, used + 8) - 1);
  }
  engine.counters.ldmatrix_tiles += static_cast<uint64_t>(tiles);
  each_lane(warp, [&](int lane, Collective& c) {
    auto* out = static_cast<TileAddresses*>(c.out);
    const int g = lane / 4, t = lane % 4;
    for (int m = 0; m < tiles; m++) {
      if (transposed) {
        out->at[2 * m] = rows[8 * m + 2 * t] + 2 * g;
        out->at[2 * m + 1] = rows[8 * m + 2 * t + 1] + 2 * g;
      } else {
        out->at[m] = rows[8 * m + g] + 4 * t;
      }
    }
  });
}

float low(uint32_t pair) { return bf16_bits_to_float(static_cast<uint16_t>(pair)); }
float high(uint32_t pair) { return bits_float(pair & 0xffff0000u); }

void perform_mma(const Warp& warp) {
  float a[16][16], b[16][8], c[16][8];
  for (int lane = 0; lane < 32; lane++) {
    const auto& in = *static_cast<const MmaOperands*>(warp.lanes[lane].call->in);
    const int g = lane / 4, t = lane % 4;
    for (int r = 0; r < 4; r++) {
      float* to = &a[g + 8 * (r % 2)][2 * t + 8 * (r / 2)];
      to[0] = low(in.a[r]);
      to[1] = high(in.a[r]);
      c[g + 8 * (r / 2)][2 * t + r % 2] = in.c[r];
    }
    for (int r = 0; r < 2; r++) {
      b[2 * t + 8 * r][g] = low(in.b[r]);
      b[2 * t + 8 * r + 1][g] = high(in.b[r]);
    }
  }
  for (int i = 0; i < 16; i++)
    for (int k = 0; k < 16; k++)
      for (int j = 0; j < 8; j++) c[i][j] += a[i][k] * b[k][j];
  for (int lane = 0; lane < 32; lane++) {
    auto* out = static_cast<float*>(warp.lanes[lane].call->out);
    const int g = lane / 4, t = lane % 4;
    for (int r = 0; r < 4; r++) out[r] = c[g + 8 * (r / 2)][2 * t + r % 2];
  }
}

}  // namespace

// Precondition: all lanes alive are in the same collective. Those that need a whole warp ask for mask ffffffff, which
// warp_collective has compared with the lanes alive.
void perform(const Warp& warp) {
  const Collective& first = *warp.lanes[std::countr_zero(warp.arrived)].call;
  switch (first.op) {
    case Op::sync: return;
    case Op::shfl: case Op::shfl_xor: case Op::shfl_up: case Op::shfl_down: return perform_shuffle(warp);
    case Op::ballot: case Op::any: case Op::all: return perform_vote(warp, first.op);
    case Op::add: case Op::min: case Op::max: return perform_reduction(warp, first);
    case Op::ldmatrix: return perform_ldmatrix(warp, first);
    case Op::mma: return perform_mma(warp);
  }
}

}  // namespace simt
