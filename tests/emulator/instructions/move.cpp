// Moves: mov with packing and unpacking, cvta, isspacep, mapa, getctarank, ld/st of parameters is in memory.cpp.
#include "families.h"
#include "lanes.h"

namespace emulator {

namespace {

// {x, y} = a, or d = {x, y}: lane by lane, low parts first
void run_unpack(Warp& w, const Instruction& in) {
  each_lane(w.mask, [&](int lane) {
    uint8_t whole[16] = {};
    std::memcpy(whole, w.in<uint8_t>(in.a) + lane * in.a.bytes, in.a.bytes);
    int at = 0;
    for (const Operand& part : in.list) {
      if (part.present) std::memcpy(w.out<uint8_t>(part) + lane * part.bytes, whole + at, part.bytes);
      at += static_cast<int>(in.value[0]);
    }
  });
}
void run_pack(Warp& w, const Instruction& in) {
  each_lane(w.mask, [&](int lane) {
    uint8_t whole[16] = {};
    int at = 0;
    for (const Operand& part : in.list) {
      std::memcpy(whole + at, w.in<uint8_t>(part) + lane * part.bytes, part.bytes);
      at += part.bytes;
    }
    std::memcpy(w.out<uint8_t>(in.d) + lane * in.d.bytes, whole, in.d.bytes);
  });
}

constexpr Type of_bytes(int bytes) {
  return bytes == 1 ? Type::b8 : bytes == 2 ? Type::b16 : bytes == 4 ? Type::b32 : bytes == 8 ? Type::b64 : Type::none;
}

template <class T>
void run_move(Warp& w, const Instruction& in) {
  const T add = static_cast<T>(in.a.in_frame ? w.frame->local_base : 0);
  T* d = w.out<T>(in.d);
  const T* a = w.in<T>(in.a);
  each_lane(w.mask, [&](int i) { d[i] = a[i] + add; });
}

void run_move_clock(Warp& w, const Instruction& in) {  // clocks count warp instructions
  each_lane(w.mask, [&](int i) { w.set_lane_value(in.d, i, w.block->launch->executed + w.executed); });
}

void mov(Decoder& s) {
  const Type t = s.type();
  if (t == Type::pred) {
    s.in.d = s.out(0, t);
    s.in.a = s.source(1, t);
    s.in.execute = [](Warp& w, const Instruction& in) { w.set_predicate(in.d, w.predicate(in.a)); };
    return;
  }
  const int bytes = bytes_of(t);
  if (s.is_vector(0)) {
    const int parts = static_cast<int>(s.expression(0).items.size());
    s.in.value[0] = bytes / parts;
    s.in.list = s.vector(0, of_bytes(bytes / parts));
    s.in.list_is_written = true;
    s.in.a = s.source(1, t);
    s.in.execute = run_unpack;
    return;
  }
  if (s.is_vector(1)) {
    s.in.d = s.out(0, t);
    s.in.list = s.vector(1, of_bytes(bytes / static_cast<int>(s.expression(1).items.size())));
    s.in.execute = run_pack;
    return;
  }
  s.in.d = s.out(0, t);
  const std::string& name = s.expression(1).name;
  s.in.a = s.source(1, t);
  if (name == "%clock" || name == "%clock64" || name == "%globaltimer") {
    s.in.execute = run_move_clock;
    return;
  }
  switch (bytes) {
    case 1:
      s.in.execute = run_move<uint8_t>;
      break;
    case 2:
      s.in.execute = run_move<uint16_t>;
      break;
    case 4:
      s.in.execute = run_move<uint32_t>;
      break;
    case 8:
      s.in.execute = run_move<uint64_t>;
      break;
    case 16:
      s.in.list = {s.in.a};
      s.in.execute = run_pack;
      break;
    default:
      s.unknown("unknown type");
  }
}

uint64_t window_of(Decoder& s) {
  if (s.take("shared") || s.take("shared::cta") || s.take("shared::cluster")) return kSharedWindow;
  if (s.take("local")) return kLocalWindow;
  if (s.take("param") || s.take("param::entry")) return kParamWindow;
  if (s.take("global") || s.take("const")) return 0;
  s.unknown("unknown state space");
}

void cvta(Decoder& s) {  // between generic addresses and those of one space
  const bool to = s.take("to");
  const int64_t window = static_cast<int64_t>(window_of(s));
  const Type t = s.type();
  s.in.d = s.out(0, t);
  s.in.a = s.source(1, t);
  s.in.value[0] = to ? -window : window;
  s.in.execute = [](Warp& w, const Instruction& in) {
    const int64_t add = in.value[0] + (in.a.in_frame ? w.frame->local_base : 0);
    each_lane(w.mask, [&](int i) { w.set_lane_value(in.d, i, w.lane_value(in.a, i) + add); });
  };
}

void isspacep(Decoder& s) {
  s.in.value[0] = static_cast<int64_t>(window_of(s) >> kSpaceShift);
  s.in.d = s.out(0, Type::pred);
  s.in.a = s.source(1, Type::u64);
  s.in.execute = [](Warp& w, const Instruction& in) {
    uint32_t result = 0;
    for (int i = 0; i < 32; ++i)
      result |= static_cast<uint32_t>(static_cast<int64_t>(w.in<uint64_t>(in.a)[i] >> kSpaceShift) == in.value[0]) << i;
    w.set_predicate(in.d, result);
  };
}

void mapa(Decoder& s) {  // the same address in a block of the cluster, which has one
  s.take("shared::cluster");
  const Type t = s.type();
  s.in.d = s.out(0, t);
  s.in.a = s.source(1, t);
  s.in.b = s.source(2, Type::u32);
  s.in.execute = [](Warp& w, const Instruction& in) {
    each_lane(w.mask, [&](int i) {
      if (w.in<uint32_t>(in.b)[i])
        throw Fault("out of bounds: rank " + std::to_string(w.in<uint32_t>(in.b)[i]) + " in a cluster of one", 1u << i);
      w.set_lane_value(in.d, i, w.lane_value(in.a, i));
    });
  };
}

}  // namespace

void move_instructions(Table& table) {
  table.add({"mov"}, "", Class::move, [](Decoder& s) {
    s.in.is_copy = true;
    mov(s);
  });
  table.add({"cvta"}, "", Class::move, cvta);
  table.add({"isspacep"}, "", Class::move, isspacep);
  table.add({"mapa"}, "", Class::move, mapa);
  table.add({"getctarank"}, "", Class::move, [](Decoder& s) {  // of an address in shared memory of the cluster
    s.take("shared::cluster");
    const Type t = s.type();
    s.in.d = s.out(0, Type::b32);
    s.in.a = s.source(1, t);
    s.in.execute = [](Warp& w, const Instruction& in) {
      each_lane(w.mask, [&](int i) { w.out<uint32_t>(in.d)[i] = 0; });
    };
  });
}

}  // namespace emulator
