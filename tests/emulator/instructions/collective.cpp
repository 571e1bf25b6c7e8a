// What lanes of a warp do together: shfl vote match redux activemask elect bar.warp.sync.
#include "families.h"
#include "groups.h"
#include "rounding.h"

namespace emulator {

namespace {

constexpr Type kWord = Type::b32;

constexpr char kShuffle[] = "shfl.sync", kVote[] = "vote.sync", kMatch[] = "match.sync", kRedux[] = "redux.sync",
               kElect[] = "elect.sync";

void shfl(Decoder& s) {  // shfl.sync.mode.b32 d[|p], a, lane, clamp, members
  s.need("sync");
  const std::string mode = s.take_one({"up", "down", "bfly", "idx"});
  s.need("b32");
  std::tie(s.in.d, s.in.d2) = s.out_pair(0, kWord, Type::pred);
  s.in.a = s.source(1, kWord);
  s.in.b = s.source(2, kWord);
  s.in.c = s.source(3, kWord);
  s.in.e = s.source(4, kWord);
  s.in.value[0] = mode == "up" ? 0 : mode == "down" ? 1 : mode == "bfly" ? 2 : 3;
  each_group<kShuffle>(s, [](Warp& w, const Instruction& in) {
    uint32_t result[32], valid = 0;
    const uint32_t *a = w.in<uint32_t>(in.a), *b = w.in<uint32_t>(in.b), *c = w.in<uint32_t>(in.c);
    for (int lane = 0; lane < 32; ++lane) {
      if (!(w.mask >> lane & 1)) continue;
      const int by = static_cast<int>(b[lane] & 31), clamp = static_cast<int>(c[lane] & 31),
                segment = static_cast<int>(c[lane] >> 8 & 31);
      const int most = (lane & segment) | (clamp & ~segment), least = lane & segment;
      int from = lane;
      bool inside = false;
      switch (in.value[0]) {
        case 0:
          from = lane - by;
          inside = from >= most;
          break;
        case 1:
          from = lane + by;
          inside = from <= most;
          break;
        case 2:
          from = lane ^ by;
          inside = from <= most;
          break;
        default:
          from = least | (by & ~segment);
          inside = from <= most;
      }
      if (!inside) from = lane;
      if (!(w.mask >> from & 1) && w.exists >> from & 1)
        throw Fault(
            "shfl.sync: collective with missing lanes: reads lane " + std::to_string(from) + ", which takes no part",
            1u << lane);
      result[lane] = a[from];
      valid |= static_cast<uint32_t>(inside) << lane;
    }
    if (in.d.present) each_lane(w.mask, [&](int i) { w.out<uint32_t>(in.d)[i] = result[i]; });
    w.set_predicate(in.d2, valid);
  });
}

void vote(Decoder& s) {
  s.need("sync");
  const std::string mode = s.take_one({"all", "any", "uni", "ballot"});
  const bool ballot = mode == "ballot";
  s.need(ballot ? "b32" : "pred");
  s.in.d = s.out(0, ballot ? kWord : Type::pred);
  s.in.a = s.source(1, Type::pred);
  s.in.e = s.source(2, kWord);
  s.in.value[0] = mode == "all" ? 0 : mode == "any" ? 1 : mode == "uni" ? 2 : 3;
  each_group<kVote>(s, [](Warp& w, const Instruction& in) {
    const uint32_t votes = w.predicate(in.a) & w.mask;
    if (in.value[0] == 3) return each_lane(w.mask, [&](int i) { w.out<uint32_t>(in.d)[i] = votes; });
    const bool yes = in.value[0] == 0 ? votes == w.mask : in.value[0] == 1 ? votes != 0 : votes == 0 || votes == w.mask;
    w.set_predicate(in.d, yes ? kAll : 0);
  });
}

void match(Decoder& s) {
  s.in.value[0] = s.take("all");
  if (!s.in.value[0]) s.need("any");
  s.need("sync");
  const Type t = s.type();
  std::tie(s.in.d, s.in.d2) = s.out_pair(0, kWord, Type::pred);
  s.in.a = s.source(1, t);
  s.in.e = s.source(2, kWord);
  each_group<kMatch>(s, [](Warp& w, const Instruction& in) {
    uint32_t same[32] = {}, all = 0;
    each_lane(w.mask, [&](int i) {
      each_lane(w.mask,
                [&](int k) { same[i] |= static_cast<uint32_t>(w.lane_value(in.a, i) == w.lane_value(in.a, k)) << k; });
      all |= static_cast<uint32_t>(same[i] == w.mask) << i;
    });
    if (in.d.present)
      each_lane(w.mask, [&](int i) { w.out<uint32_t>(in.d)[i] = !in.value[0] ? same[i] : all == w.mask ? w.mask : 0; });
    w.set_predicate(in.d2, all);
  });
}

void redux(Decoder& s) {
  s.need("sync");
  constexpr std::string_view names[] = {"add", "min", "max", "and", "or", "xor"};
  for (int k = 0; k < 6; ++k)
    if (s.take(names[k])) s.in.value[0] = k;
  s.in.value[2] = s.take("abs") | s.take("NaN") << 1;
  const Type t = s.type();
  s.in.value[1] = t == Type::s32 ? 1 : t == Type::f32 ? 2 : 0;
  if (t == Type::f32 && s.in.value[0] != 1 && s.in.value[0] != 2) s.unknown("unknown form");
  s.in.d = s.out(0, t);
  s.in.a = s.source(1, t);
  s.in.e = s.source(2, kWord);
  each_group<kRedux>(s, [](Warp& w, const Instruction& in) {
    const uint32_t* a = w.in<uint32_t>(in.a);
    bool first = true;
    uint32_t sum = 0;
    each_lane(w.mask, [&](int i) {
      uint32_t x = a[i];
      if (in.value[1] == 2 && in.value[2] & 1) x &= 0x7fffffff;
      if (first) {
        sum = x;
        first = false;
        return;
      }
      auto extreme = [&](auto p, auto q) { return in.value[0] == 1 ? std::min(p, q) : std::max(p, q); };
      if (in.value[1] == 2) {
        const float p = std::bit_cast<float>(sum), q = std::bit_cast<float>(x);
        if (std::isnan(p) || std::isnan(q))
          sum = in.value[2] & 2 ? 0x7fffffff : std::isnan(p) ? x : sum;
        else
          sum = std::bit_cast<uint32_t>(extreme(p, q));
        return;
      }
      switch (in.value[0]) {
        case 0:
          sum += x;
          break;
        case 3:
          sum &= x;
          break;
        case 4:
          sum |= x;
          break;
        case 5:
          sum ^= x;
          break;
        default:
          sum = in.value[1] ? static_cast<uint32_t>(extreme(static_cast<int32_t>(sum), static_cast<int32_t>(x)))
                            : extreme(sum, x);
      }
    });
    each_lane(w.mask, [&](int i) { w.out<uint32_t>(in.d)[i] = sum; });
  });
}

}  // namespace

void collective_instructions(Table& table) {
  table.add({"shfl"}, "", Class::collective, shfl);
  table.add({"vote"}, "", Class::collective, vote);
  table.add({"match"}, "", Class::collective, match);
  table.add({"redux"}, "", Class::collective, redux);
  table.add({"activemask"}, "", Class::collective, [](Decoder& s) {
    s.need("b32");
    s.in.d = s.out(0, kWord);
    s.in.execute = [](Warp& w, const Instruction& in) {
      each_lane(w.mask, [&](int i) { w.out<uint32_t>(in.d)[i] = w.mask; });
    };
  });
  table.add({"elect"}, "", Class::collective, [](Decoder& s) {  // elect.sync d|p, members: the lowest lane
    s.need("sync");
    std::tie(s.in.d, s.in.d2) = s.out_pair(0, kWord, Type::pred);
    s.in.e = s.source(1, kWord);
    each_group<kElect>(s, [](Warp& w, const Instruction& in) {
      const auto leader = static_cast<uint32_t>(__builtin_ctz(w.mask));
      if (in.d.present) each_lane(w.mask, [&](int i) { w.out<uint32_t>(in.d)[i] = leader; });
      w.set_predicate(in.d2, 1u << leader);
    });
  });
}

}  // namespace emulator
