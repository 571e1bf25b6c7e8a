// ld, ldu, st, prefetch, fences: loads and stores of one to eight elements per lane.
#include "access.h"
#include "families.h"
#include "hopper.h"

namespace emulator {

Space take_space(Decoder& s) {
  if (s.take("global")) return Space::global;
  if (s.take("shared") || s.take("shared::cta") || s.take("shared::cluster")) return Space::shared;
  if (s.take("local")) return Space::local;
  if (s.take("const")) return Space::constant;
  if (s.take("param") || s.take("param::entry") || s.take("param::func")) return Space::param;
  return Space::generic;
}

// Memory order, scope and cache hints. On this machine every access is performed at once, so only the race detector
// asks for the order.
Order take_order_and_hints(Decoder& s) {
  s.take("weak");
  const std::string word = s.take_one({"relaxed", "acquire", "release", "acq_rel", "volatile", "mmio", "sc"});
  s.take_one({"cta", "cluster", "gpu", "sys"});
  s.take_one({"ca", "cg", "cs", "lu", "cv", "wb", "wt"});
  s.take("nc");
  while (s.take_starting("L1::evict_") || s.take_starting("L1::no_allocate") || s.take_starting("L2::64B") ||
         s.take_starting("L2::128B") || s.take_starting("L2::256B") || s.take_starting("L2::evict_")) {
  }
  return word.empty()                        ? Order::weak
         : word == "acquire"                 ? Order::acquire
         : word == "release"                 ? Order::release
         : word == "acq_rel" || word == "sc" ? Order::acq_rel
                                             : Order::relaxed;
}

namespace {

void run_load(Warp& w, const Instruction& in) {
  const int element = static_cast<int>(in.value[0]), bytes = element * static_cast<int>(in.list.size());
  const bool sign = in.value[1];
  const bool strong = in.value[2] != static_cast<int64_t>(Order::weak);
  const auto lock = strong ? w.block->launch->strong_access() : std::unique_lock<std::mutex>();
  Traffic traffic;
  each_lane(w.mask, [&](int lane) {
    const uint8_t* from = access_memory(w, in.space, lane_address(w, in.a, lane), bytes,
                                        strong ? Access::strong_read : Access::read, lane, &traffic);
    for (const Operand& d : in.list) {
      if (d.present) {
        uint8_t* to = w.out<uint8_t>(d) + lane * d.bytes;
        if (d.bytes == element) {
          std::memcpy(to, from, element);
        } else {  // a wider register: extended
          int64_t value = 0;
          std::memcpy(&value, from, element);
          if (sign) value = value << (64 - 8 * element) >> (64 - 8 * element);
          std::memcpy(to, &value, d.bytes);
        }
      }
      from += element;
    }
  });
  traffic.finish(w, in, Access::read);
}

void run_store(Warp& w, const Instruction& in) {
  const int element = static_cast<int>(in.value[0]), bytes = element * static_cast<int>(in.list.size());
  const auto order = static_cast<Order>(in.value[2]);
  const bool strong = order != Order::weak;
  const auto lock = strong ? w.block->launch->strong_access() : std::unique_lock<std::mutex>();
  if (releases(order)) w.block->order.fence(w.index, true);
  Traffic traffic;
  StoreCheck check;
  each_lane(w.mask, [&](int lane) {
    uint8_t* to = access_memory(w, in.space, lane_address(w, in.a, lane), bytes,
                                strong ? Access::strong_write : Access::write, lane, &traffic);
    uint8_t value[32];
    for (size_t i = 0; i < in.list.size(); ++i)
      std::memcpy(value + i * element, w.in<uint8_t>(in.list[i]) + lane * in.list[i].bytes, element);
    if (!strong) check.add(to, lane, value, bytes);
    std::memcpy(to, value, bytes);
  });
  traffic.finish(w, in, Access::write);
}

void load_store(Decoder& s) {
  s.in.value[2] = static_cast<int64_t>(take_order_and_hints(s));
  if (s.opcode() == "st" && s.take("async")) return async_store(s);
  const bool policy = s.take("L2::cache_hint");
  s.in.space = take_space(s);
  const std::string vector = s.take_one({"v2", "v4", "v8"});
  const Type t = s.type();
  const bool load = s.opcode() != "st";
  const int data = load ? 0 : 1, address = load ? 1 : 0;
  s.in.a = s.address(address);
  s.in.list = s.vector(data, t, true);
  s.in.list_is_written = load;
  if (policy) s.source(2, Type::b64);
  const size_t count = vector.empty() ? 1 : vector[1] - '0';
  if (s.in.list.size() != count) s.unknown("vector of another size");
  for (const Operand& one : s.in.list)
    if (one.present && one.bytes < bytes_of(t)) s.unknown("register too narrow");
  s.in.value[0] = bytes_of(t);
  s.in.value[1] = is_signed(t);
  s.in.execute = load ? run_load : run_store;
}

void nothing(Warp&, const Instruction&) {}

void prefetch(Decoder& s) {
  while (!s.take_one({"global", "local", "L1", "L2", "tensormap", "param", "const", "param::entry"}).empty() ||
         s.take_starting("L2::evict")) {
  }
  s.address(0);
  if (s.count() > 1) s.immediate(1);  // applypriority and discard: bytes
  s.in.execute = nothing;
}

// value: [0] beyond the block
void run_fence(Warp& w, const Instruction& in) { w.block->order.fence(w.index, in.value[0]); }

// fence.proxy.async makes generic writes visible to the async proxy. value: [0] of shared, [1] of global memory
void run_proxy_fence(Warp& w, const Instruction& in) {
  if (in.value[0]) w.block->shared.fence_proxy(w.index);
  if (in.value[1]) w.block->order.fence_proxy(w.index);
}

// membar.cta .gl .sys; fence.order.scope; fence.proxy.kind
void fence(Decoder& s) {
  const bool proxy = s.take("proxy"), async = s.take("async") || s.take("async::generic");
  const bool global = s.take("global") || s.take("async.global"),
             shared = !s.take_one({"shared::cta", "shared::cluster", "shared"}).empty();
  const std::string scope = s.take_one({"cta", "cluster", "gpu", "sys", "gl"});
  while (!s.take_one({"sc", "acq_rel", "acquire", "release", "mbarrier_init", "alias", "tensormap::generic",
                      "sync_restrict::shared::cta", "sync_restrict::shared::cluster"})
              .empty()) {
  }
  if (s.count()) {  // tensor map proxy: [address], size
    s.address(0);
    s.immediate(1);
  }
  if (!proxy) {
    s.in.value[0] = scope != "cta" && scope != "cluster";
    s.in.execute = run_fence;
    return;
  }
  s.in.value[0] = async && !global;
  s.in.value[1] = async && !shared;
  s.in.execute = run_proxy_fence;
}

void createpolicy(Decoder& s) {  // a cache policy means nothing here
  while (s.take_starting("fractional") || s.take_starting("range") || s.take_starting("cvt") || s.take_starting("L2") ||
         s.take("b64") || s.take("global")) {
  }
  s.in.d = s.out(0, Type::b64);
  for (int i = 1; i < s.count(); ++i) s.expression(i);
  s.in.execute = [](Warp& w, const Instruction& in) {
    each_lane(w.mask, [&](int i) { w.out<uint64_t>(in.d)[i] = 0; });
  };
}

}  // namespace

void memory_instructions(Table& table) {
  table.add({"ld", "ldu", "st"}, "", Class::memory, load_store);
  table.add({"prefetch", "prefetchu", "applypriority", "discard"}, "", Class::memory, prefetch);
  table.add({"fence", "membar"}, "", Class::barrier, fence);
  table.add({"createpolicy"}, "", Class::move, createpolicy);
}

}  // namespace emulator
