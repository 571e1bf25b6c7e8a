// The passes as the operators run them, on a ring of real or of virtual ranks.
#pragma once

#include <tuple>

#include "ops/checks.h"
#include "ops/groups.h"

namespace ringattn {

struct SavedForBackward {
  at::Tensor query, key, value, out, lse, kept, grad_out;
  std::optional<at::Tensor> grad_lse;
  at::Tensor forward_call;  // what ring_forward wrote to `order`; undefined for virtual ranks
};

// -> out, lse, kept. The number of the call on the group is written to `order`, unless that is undefined.
std::tuple<at::Tensor, at::Tensor, at::Tensor> forward_on(Ring& ring, const at::Tensor& query, const at::Tensor& key,
                                                          const at::Tensor& value, const at::Tensor& order,
                                                          const PassOptions& options, int threads);

// -> gradients of query, key and value; empty [0] where not wanted.
std::tuple<at::Tensor, at::Tensor, at::Tensor> backward_on(Ring& ring, const SavedForBackward& saved,
                                                           const PassOptions& options, int threads);

}  // namespace ringattn
