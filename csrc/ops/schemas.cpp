// The schemas of torch.ops.ringattn. Shapes: query [B, Hq, S, D]; key, value [B, Hkv, S, D] with S this rank's tokens.
//
// Ring operators take a group by name ("" is a ring of one) and a one-element int64 CPU tensor `order`, which they all
// declare to write and into which ring_forward writes a mark of its call. A compiler that is given the same tensor for
// all ring calls therefore keeps them in program order, also those whose results nobody uses, on every rank alike. The
// operators are not differentiable; ring_backward is what the autograd function in Python calls.
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <string>

TORCH_LIBRARY(ringattn, m) {
  const std::string mask = "bool is_causal, int[]? window, Tensor? cu_seqlens, float? scale";
  const std::string options = mask + ", bool enable_gqa, bool deterministic, bool[] needs_grad";
  const std::string place = "str group, str layout, SymInt? seq_len, SymInt? key_seq_len";
  const std::string virtual_place = "int world_size, str layout";
  const std::string saved =
      "Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, Tensor kept";
  const std::string gradients = "(Tensor grad_query, Tensor grad_key, Tensor grad_value)";
  const auto define = [&m](const std::string& schema) { m.def(schema.c_str()); };

  // -> out as query; lse [B, Hq, S], natural log, in float64 for float64 inputs and else float32; kept: the packed keys
  // and values on which the pass ended, for ring_backward; empty in a ring of one. needs_grad: query, key, value.
  define("ring_forward(Tensor query, Tensor key, Tensor value, Tensor(a!) order, " + place + ", " + options +
         ") -> (Tensor out, Tensor lse, Tensor kept)");

  // -> gradients of query, key and value; empty [0] where needs_grad says no. grad_lse may be None.
  // forward_call: what ring_forward wrote to its `order`: the number of its call on the group, which the ranks compare,
  // so that all mean the same pass, and which of the groups that had this name it was.
  define("ring_backward(" + saved + ", Tensor forward_call, Tensor(a!) order, " + place + ", " + options + ") -> " +
         gradients);

  // The same with whole tensors, P virtual ranks in this process; kept is [P, elements].
  define("virtual_ring_forward(Tensor query, Tensor key, Tensor value, " + virtual_place + ", " + options +
         ") -> (Tensor out, Tensor lse, Tensor kept)");
  define("virtual_ring_backward(" + saved + ", " + virtual_place + ", " + options + ") -> " + gradients);

  // Sharding. shard is local: this rank's tokens along dim. gather passes all parts round the ring -> whole tensor.
  m.def("shard(Tensor whole, int dim, str group, str layout) -> Tensor");
  // generation: of the group on which the backward pass that this is began; another one is refused.
  define(
      "gather(Tensor part, Tensor(a!) order, int dim, str group, str layout, SymInt? seq_len, int? generation=None) -> "
      "Tensor");

  // Takes part in the next call on a group by refusing it: the other ranks raise an error that gives the reason.
  // payload: where the tensors of the call would have been, which decides whether the ranks compare it.
  m.def("refuse(Tensor(a!) order, str group, str reason, Device payload) -> ()");

  // Opens the connections of the group for tensors of a device.
  m.def("init(Tensor(a!) order, str group, Device device) -> ()");

  // The ranks compare their calls in the host's memory. A group without a backend for that needs a side group of the
  // same ranks in the same order.
  m.def("lacks_side_group(str group) -> bool");
  m.def("use_side_group(str group, str side) -> ()");

  // Gives back the buffers that the calls on a group share.
  m.def("release_workspace(str group) -> ()");

  // What tells a group from others of this process that have or had its name; 0 in a ring of one.
  m.def("generation(str group) -> int");

  // How many calls this process has taken part in on a group; 0 in a ring of one.
  m.def("calls(str group) -> int");

  // --- local building blocks ---
  //
  // The state: o [B, Hq, Sq, D] unnormalised output, m [B, Hq, Sq] reference maximum of the raw scores, l [B, Hq, Sq]
  // sum of exp(scale * (score - m)); contiguous float64 for float64 inputs, else float32. Empty: (0, -inf, 0).
  // query_segments and key_segments: start, stride, length of one or two segments of global positions; lengths sum to
  // Sq and Skv. key_seq_len: keys of the whole sequence.

  const std::string positions = "int[] query_segments, int[] key_segments, int key_seq_len, " + mask;

  // The state absorbs one block of keys and values. With finalize also -> out, lse; otherwise two empty tensors.
  define("block_forward_(Tensor(a!) o, Tensor(b!) m, Tensor(c!) l, Tensor query, Tensor key, Tensor value, " +
         positions + ", bool finalize) -> (Tensor out, Tensor lse)");

  // Adds one block's part to the accumulators grad_query as query, grad_key and grad_value as key (None: not wanted).
  define(
      "block_backward_(Tensor(a!)? grad_query, Tensor(b!)? grad_key, Tensor(c!)? grad_value, Tensor grad_out, "
      "Tensor query, Tensor key, Tensor value, Tensor lse, Tensor delta, " +
      positions + ", bool deterministic) -> ()");

  // rowsum(grad_out * out) - grad_lse, [B, Hq, Sq].
  m.def("delta(Tensor out, Tensor grad_out, Tensor? grad_lse) -> Tensor");

  // (o, m, l) absorbs another state of the same rows.
  m.def(
      "merge_(Tensor(a!) o, Tensor(b!) m, Tensor(c!) l, Tensor other_o, Tensor other_m, Tensor other_l, float scale) "
      "-> ()");

  // out = o / l in the given type (rows that saw no key: 0), lse = scale * m + ln l (-inf).
  m.def("finalize(Tensor o, Tensor m, Tensor l, float scale, ScalarType dtype) -> (Tensor out, Tensor lse)");

  // Tokens in a key tile of block_forward_: a pass cut into calls on tile boundaries gives the bits of one call.
  m.def("key_tile(ScalarType dtype, int head_dim, Device device) -> int");
}

// Not differentiable: asking for a gradient through an operator raises instead of giving none.
TORCH_LIBRARY_IMPL(ringattn, Autograd, m) {
  for (const char* name :
       {"ring_forward", "ring_backward", "virtual_ring_forward", "virtual_ring_backward", "shard", "gather", "refuse",
        "init", "block_forward_", "block_backward_", "delta", "merge_", "finalize"}) {
    m.impl(name, torch::autograd::autogradNotImplementedFallback());
  }
}

TORCH_LIBRARY_IMPL(ringattn, ADInplaceOrView, m) {
  for (const char* name :
       {"ring_forward", "ring_backward", "gather", "refuse", "init", "block_forward_", "block_backward_", "merge_"}) {
    m.impl(name, torch::autograd::autogradNotImplementedInplaceOrViewFallback());
  }
}
