// The ranks of a torch.distributed group, over whatever backend the group has.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <memory>

#include "comm/transport.h"

namespace ringattn {

std::unique_ptr<Transport> c10d_transport(c10::intrusive_ptr<c10d::ProcessGroup> group);

}  // namespace ringattn
