#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <string>

#include "fsdpp/comm/peer_group.h"

namespace fsdpp::comm {

/// What c10d wants of a group of ours before it serves it: a store, and a name that no other group of the
/// process has.
struct CudaGroup {
  c10::intrusive_ptr<c10d::Store> store;
  std::string name;
};

/// Collective: rank 0 serves a store on this host, the others connect to it.
[[nodiscard]] CudaGroup open_cuda_group(PeerGroup& group);

}  // namespace fsdpp::comm
