#include "fsdpp/comm/cuda_group.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <atomic>
#include <vector>

#include "fsdpp/base/error.h"

namespace fsdpp::comm {

CudaGroup open_cuda_group(PeerGroup& group) {
  static std::atomic<int> groups{0};
  const std::string name = text("fsdpp/", group.name(), "/", groups.fetch_add(1));
  c10d::TCPStoreOptions options;
  options.port = 0;  // any free one
  options.isServer = true;
  options.waitWorkers = false;
  options.numWorkers = group.ranks();
  options.timeout = group.timeout();
  c10::intrusive_ptr<c10d::TCPStore> store;
  if (group.rank() == 0) store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  const std::vector<double> ports = group.exchange(std::vector<double>{store ? 1.0 * store->getPort() : 0.0});
  if (!store) {
    options.port = static_cast<uint16_t>(ports[0]);
    options.isServer = false;
    store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  }
  return {c10::make_intrusive<c10d::PrefixStore>(name, store), name};
}

}  // namespace fsdpp::comm
