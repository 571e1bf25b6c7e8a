// All ranks see the headers of all ranks, after ceil(log2 P) exchanges: in round k each rank passes on the 2^k headers
// it holds to the rank 2^k seats down, and doubles what it knows (Bruck et al., IEEE TPDS 8(11), 1997).
#include <ATen/Functions.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <type_traits>

#include "comm/transport.h"

namespace ringattn {

static_assert(std::is_trivially_copyable_v<CallHeader>);

std::string Stage::text() const {
  return hop < 0 ? name : std::string(name) + ' ' + std::to_string(hop) + " of " + std::to_string(hops);
}

std::vector<CallHeader> exchange_headers(Transport& transport, const CallHeader& own) {
  const int P = transport.world_size();
  const int rank = transport.rank();
  const std::int64_t bytes = sizeof(CallHeader);

  // Row j holds the header of rank (rank + j) % P.
  at::Tensor rows = at::empty({P, bytes}, at::kByte);
  std::memcpy(rows.data_ptr(), &own, sizeof(own));
  for (int known = 1; known < P; known *= 2) {
    const int more = std::min(known, P - known);
    Stage stage{"comparing calls"};
    for (int j = known; j < P; ++j) stage.awaited.push_back((rank + j) % P);
    transport
        .post({{rows.narrow(0, 0, more), (rank - known + P) % P}}, {{rows.narrow(0, known, more), (rank + known) % P}},
              stage)
        ->wait();
  }

  std::vector<CallHeader> headers(P);
  for (int j = 0; j < P; ++j) {
    const auto* row = static_cast<const std::uint8_t*>(rows.data_ptr()) + j * bytes;
    std::memcpy(static_cast<void*>(&headers[(rank + j) % P]), row, sizeof(CallHeader));
  }
  return headers;
}

}  // namespace ringattn
