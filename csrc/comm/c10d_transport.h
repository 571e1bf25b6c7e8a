// The ranks of a torch.distributed group, over whatever backend the group has.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <memory>

#include "comm/host_exchange.h"
#include "comm/transport.h"

namespace ringattn {

std::unique_ptr<Transport> c10d_transport(c10::intrusive_ptr<c10d::ProcessGroup> group, Owner owner);

// What the backends of a group can carry. A device other than the CPU needs one that coalesces messages: NCCL does.
bool carries_cpu(const c10::intrusive_ptr<c10d::ProcessGroup>& group);
bool carries_accelerators(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

}  // namespace ringattn
