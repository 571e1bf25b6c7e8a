// atom and red: one lane after the other, each at once.
#include "access.h"
#include "families.h"
#include "rounding.h"

namespace emulator {

Space take_space(Decoder& s);
Order take_order_and_hints(Decoder& s);

namespace {

enum Operation { kAdd, kMin, kMax, kAnd, kOr, kXor, kExch, kCas, kInc, kDec };
constexpr std::string_view kNames[] = {"add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"};

template <class T>
T apply(int operation, T old, T b, T c) {
  switch (operation) {
    case kAdd:
      if constexpr (std::is_integral_v<T>)
        return static_cast<T>(static_cast<std::make_unsigned_t<T>>(old) + static_cast<std::make_unsigned_t<T>>(b));
      return old + b;
    case kMin:
      return old < b ? old : b;
    case kMax:
      return old > b ? old : b;
    case kExch:
      return b;
    default:
      break;
  }
  if constexpr (std::is_integral_v<T>) {
    switch (operation) {
      case kAnd:
        return old & b;
      case kOr:
        return old | b;
      case kXor:
        return old ^ b;
      case kCas:
        return old == b ? c : old;
      case kInc:
        return old >= b ? 0 : old + 1;
      case kDec:
        return old == 0 || old > b ? b : old - 1;
      default:
        break;
    }
  }
  return old;
}

template <bool kBf>
uint16_t apply_half(int operation, uint16_t old, uint16_t b) {
  const double x = kBf ? from_bfloat(old) : from_half(old), y = kBf ? from_bfloat(b) : from_half(b);
  const double value = operation == kAdd ? odd_sum(x, y) : operation == kMin ? std::fmin(x, y) : std::fmax(x, y);
  return static_cast<uint16_t>(encode(value, kBf ? kBfloat : kHalf, Round::nearest));
}

// One element at `at`.
using Apply = void (*)(int operation, uint8_t* at, const uint8_t* b, const uint8_t* c);

template <class T>
void apply_at(int operation, uint8_t* at, const uint8_t* b, const uint8_t* c) {
  T old, x, y{};
  std::memcpy(&old, at, sizeof(T));
  std::memcpy(&x, b, sizeof(T));
  if (c) std::memcpy(&y, c, sizeof(T));
  old = apply(operation, old, x, y);
  std::memcpy(at, &old, sizeof(T));
}
template <bool kBf, int kCount>
void apply_half_at(int operation, uint8_t* at, const uint8_t* b, const uint8_t*) {
  for (int i = 0; i < kCount; ++i) {
    uint16_t old, x;
    std::memcpy(&old, at + 2 * i, 2);
    std::memcpy(&x, b + 2 * i, 2);
    old = apply_half<kBf>(operation, old, x);
    std::memcpy(at + 2 * i, &old, 2);
  }
}
void exchange_wide(int operation, uint8_t* at, const uint8_t* b, const uint8_t* c) {  // 128 bits: exch and cas
  if (operation == kExch)
    std::memcpy(at, b, 16);
  else if (std::memcmp(at, b, 16) == 0)
    std::memcpy(at, c, 16);
}

Apply apply_of(Decoder& s, Type t) {
  switch (t) {
    case Type::b16:
      return apply_at<uint16_t>;
    case Type::b32:
    case Type::u32:
      return apply_at<uint32_t>;
    case Type::s32:
      return apply_at<int32_t>;
    case Type::b64:
    case Type::u64:
      return apply_at<uint64_t>;
    case Type::s64:
      return apply_at<int64_t>;
    case Type::f32:
      return apply_at<float>;
    case Type::f64:
      return apply_at<double>;
    case Type::f16:
      return apply_half_at<false, 1>;
    case Type::f16x2:
      return apply_half_at<false, 2>;
    case Type::bf16:
      return apply_half_at<true, 1>;
    case Type::bf16x2:
      return apply_half_at<true, 2>;
    case Type::b128:
      return exchange_wide;
    default:
      s.unknown("unknown type");
  }
}

void run(Warp& w, const Instruction& in) {
  const int operation = static_cast<int>(in.value[0]), element = static_cast<int>(in.value[1]);
  const auto apply = reinterpret_cast<Apply>(in.value[2]);
  const size_t count = in.list_b.size();
  const int bytes = element * static_cast<int>(count);
  Launch& launch = *w.block->launch;
  const auto lock = launch.strong_access();
  const auto order = static_cast<Order>(in.value[3]);
  if (releases(order)) w.block->order.fence(w.index, true);
  Traffic traffic;
  each_lane(w.mask, [&](int lane) {
    const uint64_t address = lane_address(w, in.a, lane);
    uint8_t* at = access_memory(w, in.space, address, bytes, Access::atomic, lane, &traffic);
    bool changed = false;
    for (size_t k = 0; k < count; ++k, at += element) {
      uint8_t old[16];
      std::memcpy(old, at, element);
      const Operand& b = in.list_b[k];
      const uint8_t* c = in.c.present ? w.in<uint8_t>(in.c) + lane * in.c.bytes : nullptr;
      apply(operation, at, w.in<uint8_t>(b) + lane * b.bytes, c);
      changed |= std::memcmp(at, old, element) != 0;
      if (!in.list.empty() && in.list[k].present)
        std::memcpy(w.out<uint8_t>(in.list[k]) + lane * element, old, element);
    }
    if (changed) w.block->changed();
    // Nobody can tell that it wrote what was there, so that publishes nothing: a failed cas.
    if (changed && launch.check_races && address >> kSpaceShift == 0 && in.space != Space::shared)
      w.block->order.release(w.index, address, bytes, !releases(order) && in.list.empty());
  });
  if (launch.schedule != Schedule::in_order && w.block->random() % 8 == 0) w.yield();
  traffic.finish(w, in, bytes, Access::atomic);
}

void atomic(Decoder& s) {
  const bool returns = s.opcode() == "atom";
  s.in.value[3] = static_cast<int64_t>(take_order_and_hints(s));
  s.take("noftz");
  s.take("async") ? s.unknown("red.async") : void();
  const bool policy = s.take("L2::cache_hint");
  s.in.space = take_space(s);
  s.in.value[0] = -1;
  for (int k = 0; k < 10; ++k)
    if (s.take(kNames[k])) s.in.value[0] = k;
  if (s.in.value[0] < 0) s.unknown("unknown operation");
  const std::string vector = s.take_one({"v2", "v4", "v8"});
  const Type t = s.type();
  s.in.value[1] = bytes_of(t);
  s.in.value[2] = reinterpret_cast<int64_t>(apply_of(s, t));
  int at = 0;
  s.in.list_is_written = true;
  if (returns) s.in.list = s.vector(at++, t);
  s.in.a = s.address(at++);
  s.in.list_b = s.vector(at++, t);
  if (s.in.value[0] == kCas) s.in.c = s.source(at++, t);
  if (policy) s.source(at++, Type::b64);
  if (s.in.list_b.size() != (vector.empty() ? 1u : static_cast<unsigned>(vector[1] - '0')))
    s.unknown("vector of another size");
  s.in.execute = run;
}

}  // namespace

void atomic_instructions(Table& table) { table.add({"atom", "red"}, "", Class::atomic, atomic); }

}  // namespace emulator
