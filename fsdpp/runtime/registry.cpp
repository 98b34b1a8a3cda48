#include "fsdpp/runtime/registry.h"

#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

#include "fsdpp/base/error.h"
#include "fsdpp/runtime/sink.h"

namespace fsdpp::runtime {
namespace {

struct UnitEntry {
  std::weak_ptr<ShardedModel> model;
  int unit;
};

struct Tables {
  std::shared_mutex mutex;
  std::unordered_map<const torch::nn::Module*, UnitEntry> units;
  std::unordered_map<const c10::TensorImpl*, std::weak_ptr<SinkOwner>> sinks;
};

Tables& tables() {
  static Tables* instance = new Tables;  // never destroyed: models may end after static destructors began
  return *instance;
}

}  // namespace

void register_unit(const torch::nn::Module& module, std::weak_ptr<ShardedModel> model, int unit) {
  const std::unique_lock lock(tables().mutex);
  tables().units[&module] = {std::move(model), unit};
}

void unregister_unit(const torch::nn::Module& module) noexcept {
  const std::unique_lock lock(tables().mutex);
  tables().units.erase(&module);
}

UnitRef find_unit(const torch::nn::Module& module) {
  const std::shared_lock lock(tables().mutex);
  const auto found = tables().units.find(&module);
  if (found == tables().units.end()) return {};
  return {found->second.model.lock(), found->second.unit};
}

bool SinkOwner::contribute(const RowWriter& write) {
  const std::optional<GradSink> sink = open();
  if (!sink) return false;
  write(*sink, 0, sink->view.size(0));
  report();
  return true;
}

at::Tensor SinkOwner::gather_rows(const at::Tensor&, const std::shared_ptr<RowClaim>&) {
  throw UsageError("this weight is not exchanged by rows: read it");
}

bool SinkOwner::add_rows(const at::Tensor&, const at::Tensor&, RowClaim&) { return false; }

void register_sink(const at::Tensor& weight, std::weak_ptr<SinkOwner> owner) {
  const std::unique_lock lock(tables().mutex);
  tables().sinks[weight.unsafeGetTensorImpl()] = std::move(owner);
}

void unregister_sink(const at::Tensor& weight) noexcept {
  const std::unique_lock lock(tables().mutex);
  tables().sinks.erase(weight.unsafeGetTensorImpl());
}

std::shared_ptr<SinkOwner> sink_of(const at::Tensor& weight) {
  const std::shared_lock lock(tables().mutex);
  const auto found = tables().sinks.find(weight.unsafeGetTensorImpl());
  if (found == tables().sinks.end()) return nullptr;
  return found->second.lock();
}

}  // namespace fsdpp::runtime
