// What a launch reads and writes follows from its arguments; it is written down on the launch's stream, and then
// computed: by the CPU's kernels or by a runner of the launches that the CUDA kernels would be given.
#include "native/kernels.h"

#include <cmath>
#include <limits>
#include <stdexcept>

#include "cpu/kernels.h"
#include "native/machine.h"
#include "native/ranges.h"

namespace streams {
namespace {

using ringattn::BlockArgs;
using ringattn::DType;
using ringattn::Launch;
using ringattn::Rows;

constexpr double kLog2E = 1.44269504088896340736;
constexpr std::int64_t kAccumulator = sizeof(float);

struct Running {
  Runner runner;
  int arch = 80;
};
Running running;

// The arguments of one call: what it accesses, and, for a runner, the same arguments with addresses of its own.
struct Call {
  explicit Call(const BlockArgs& args) : args(args), moved(args) {}

  void rows(const char* name, Rows BlockArgs::* field, std::int64_t heads, std::int64_t tokens, bool reads, bool writes,
            bool is_accumulator = false) {
    Rows& rows = moved.*field;
    const std::int64_t element = is_accumulator ? kAccumulator : 2;
    std::vector<Dimension> sizes{
        {args.B, rows.batch_stride}, {heads, rows.head_stride}, {tokens, rows.token_stride}, {args.D, 1}};
    rows.data = access(name, rows.data, ranges_of(rows.data, element, std::move(sizes)), reads, writes);
  }

  template <typename Pointer>
  void array(const char* name, Pointer BlockArgs::* field, std::int64_t count, bool reads, bool writes) {
    moved.*field = access(name, moved.*field, ranges_of(moved.*field, kAccumulator, {{count, 1}}), reads, writes);
  }

  void documents() {
    auto& bounds = moved.mask.document_bounds;
    Ranges ranges = ranges_of(bounds, sizeof(*bounds), {{args.mask.document_count + 1, 1}});
    bounds = static_cast<const std::int32_t*>(access("document_bounds", bounds, std::move(ranges), true, false));
  }

  void* access(const char* name, const void* pointer, Ranges ranges, bool reads, bool writes) {
    if (pointer == nullptr || ranges.empty() || !(reads || writes)) return const_cast<void*>(pointer);
    // A window of its own for each argument, above those of arrays; the low bits, on which alignment depends, stay.
    const auto host = reinterpret_cast<std::uintptr_t>(pointer);
    const std::uint64_t address = ((8192 + regions.size()) << 40) + (1 << 20) + host % 4096;
    const auto bytes = static_cast<std::int64_t>(ranges.back().second - host);
    regions.push_back({address, host, bytes, name, !writes});
    if (reads) accesses.push_back({name, false, ranges});
    if (writes) accesses.push_back({name, true, std::move(ranges)});
    return reinterpret_cast<void*>(address);
  }

  void enqueue(const char* name, const Launch& launch) {
    if (launch.stream == nullptr) throw std::invalid_argument("a launch without a stream");
    const auto& stream = *static_cast<const Stream*>(launch.stream);
    if (Machine::current_device() != stream.device) {
      log().complain(std::string(name) + " is launched on stream " + stream.name + " while device " +
                     std::to_string(Machine::current_device()) + " is current");
    }
    if (fault("kernel")) throw std::runtime_error(std::string(name) + " cannot be launched");
    machine().operation(stream, name, std::move(accesses));
  }

  const BlockArgs& args;
  BlockArgs moved;
  std::vector<Access> accesses;
  std::vector<Region> regions;
};

std::int64_t row_count(const BlockArgs& args) { return args.B * args.Hq * args.Sq; }

void state(Call& call, bool reads, bool writes) {
  const std::int64_t rows = row_count(call.args);
  call.array("o", &BlockArgs::o, rows * call.args.D, reads, writes);
  call.array("m", &BlockArgs::m, rows, reads, writes);
  call.array("l", &BlockArgs::l, rows, reads, writes);
}

void results(Call& call) {
  call.rows("out", &BlockArgs::out, call.args.Hq, call.args.Sq, false, true);
  call.array("lse", &BlockArgs::lse, row_count(call.args), false, true);
}

void block(Call& call) {
  const BlockArgs& args = call.args;
  call.rows("query", &BlockArgs::query, args.Hq, args.Sq, true, false);
  call.rows("key", &BlockArgs::key, args.Hkv, args.Skv, true, false);
  call.rows("value", &BlockArgs::value, args.Hkv, args.Skv, true, false);
  call.documents();
}

Launch here() {
  return {.parallel = [](std::int64_t count, const std::function<void(std::int64_t)>& task) {
    for (std::int64_t i = 0; i < count; ++i) task(i);
  }};
}

template <typename Plan>
bool run(const Call& call, Plan plan) {
  if (!running.runner) return false;
  running.runner(plan(call.moved), call.regions);
  return true;
}

void forward(const BlockArgs& args, const Launch& launch) {
  Call call(args);
  block(call);
  state(call, args.load_state, args.store_state);
  if (args.finalize) results(call);
  call.enqueue("forward", launch);
  if (!run(call, [](const BlockArgs& moved) { return ringattn::cuda::plan_forward(moved, running.arch); })) {
    ringattn::cpu::kernels().forward(args, here());
  }
}

void finalize(const BlockArgs& args, const Launch& launch) {
  Call call(args);
  state(call, true, false);
  results(call);
  call.enqueue("finalize", launch);
  if (!run(call, ringattn::cuda::plan_finalize)) ringattn::cpu::kernels().finalize(args, here());
}

void merge(const BlockArgs& args, const Launch& launch) {
  Call call(args);
  const std::int64_t rows = row_count(args);
  state(call, true, true);
  call.array("other_o", &BlockArgs::other_o, rows * args.D, true, false);
  call.array("other_m", &BlockArgs::other_m, rows, true, false);
  call.array("other_l", &BlockArgs::other_l, rows, true, false);
  call.enqueue("merge", launch);
  if (!run(call, ringattn::cuda::plan_merge)) ringattn::cpu::kernels().merge(args, here());
}

void delta(const BlockArgs& args, const Launch& launch) {
  Call call(args);
  const std::int64_t rows = row_count(args);
  call.rows("out", &BlockArgs::out, args.Hq, args.Sq, true, false);
  call.rows("grad_out", &BlockArgs::grad_out, args.Hq, args.Sq, true, false);
  call.array("grad_lse", &BlockArgs::grad_lse, rows, true, false);
  call.array("lse", &BlockArgs::lse, rows, args.minus_lse_log2 != nullptr, false);
  call.array("delta", &BlockArgs::delta, rows, false, true);
  call.array("minus_lse_log2", &BlockArgs::minus_lse_log2, rows, false, true);
  call.array("minus_delta", &BlockArgs::minus_delta, rows, false, true);
  call.enqueue("delta", launch);
  if (run(call, ringattn::cuda::plan_delta)) return;
  std::vector<float> own(args.delta == nullptr ? rows : 0);
  BlockArgs here_args = args;
  if (args.delta == nullptr) here_args.delta = own.data();
  ringattn::cpu::kernels().delta(here_args, here());
  const auto* lse = static_cast<const float*>(args.lse);
  const auto* sums = static_cast<const float*>(here_args.delta);
  for (std::int64_t i = 0; i < rows; ++i) {
    if (args.minus_lse_log2 != nullptr) {
      const bool nothing = lse[i] == -std::numeric_limits<float>::infinity();
      static_cast<float*>(args.minus_lse_log2)[i] = nothing ? lse[i] : static_cast<float>(-lse[i] * kLog2E);
    }
    if (args.minus_delta != nullptr) static_cast<float*>(args.minus_delta)[i] = -sums[i];
  }
}

void backward(const BlockArgs& args, const Launch& launch) {
  Call call(args);
  const std::int64_t rows = row_count(args);
  block(call);
  call.rows("grad_out", &BlockArgs::grad_out, args.Hq, args.Sq, true, false);
  call.array("minus_lse_log2", &BlockArgs::minus_lse_log2, rows, true, false);
  call.array("minus_delta", &BlockArgs::minus_delta, rows, true, false);
  call.rows("grad_query", &BlockArgs::grad_query, args.Hq, args.Sq, true, true, true);
  call.rows("grad_key", &BlockArgs::grad_key, args.Hkv, args.Skv, true, true, true);
  call.rows("grad_value", &BlockArgs::grad_value, args.Hkv, args.Skv, true, true, true);
  call.enqueue("backward", launch);
  if (run(call, [](const BlockArgs& moved) { return ringattn::cuda::plan_backward(moved, running.arch); })) return;
  // The CPU's kernels read lse and delta, those of GPUs what delta made of them: these alone count here.
  std::vector<float> lse(rows), sums(rows);
  for (std::int64_t i = 0; i < rows; ++i) {
    const float given = static_cast<const float*>(args.minus_lse_log2)[i];
    const bool nothing = given == -std::numeric_limits<float>::infinity();
    lse[i] = nothing ? given : static_cast<float>(-given / kLog2E);
    sums[i] = -static_cast<const float*>(args.minus_delta)[i];
  }
  BlockArgs here_args = args;
  here_args.lse = lse.data();
  here_args.delta = sums.data();
  ringattn::cpu::kernels().backward(here_args, here());
}

ringattn::Obstacle obstacle(DType dtype, std::int64_t head_dim, int device) {
  const std::string name = "double of a GPU (gpudouble:" + std::to_string(device) + ")";
  if (dtype != DType::bfloat16 && dtype != DType::float16) {
    return {ringattn::Obstacle::Kind::dtype, name + " takes bfloat16 and float16"};
  }
  if (head_dim % 8 != 0 || head_dim > 256) {
    return {ringattn::Obstacle::Kind::head_dim, name + " takes a head_dim that is a multiple of 8 and at most 256"};
  }
  return {};
}

}  // namespace

const ringattn::KernelTable& kernels() {
  static const ringattn::KernelTable table{
      .key_tile = [](DType dtype, std::int64_t head_dim) { return ringattn::cpu::kernels().key_tile(dtype, head_dim); },
      .forward = forward,
      .finalize = finalize,
      .merge = merge,
      .delta = delta,
      .backward = backward,
      .obstacle = obstacle,
      .capture = [](void*) { return machine().capture.load(); },
  };
  return table;
}

void set_runner(Runner runner, int arch) { running = {std::move(runner), arch}; }

}  // namespace streams
