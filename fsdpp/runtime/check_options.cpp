#include "fsdpp/runtime/check_options.h"

#include "fsdpp/base/error.h"

namespace fsdpp::runtime {
namespace {

using c10::ScalarType;

void check_replicas(const Options& options, const RankGroups& ranks, const std::string& unit) {
  if (!options.shard_optimizer_over_replicas) return;
  require(ranks.replicate != nullptr,
          "shard_optimizer_over_replicas on a mesh without the axis \"replicate\": "
          "there are no replicas (an axis of size 1 has none); leave the option out, or give a hybrid mesh");
  require(shards_optimizer(options.strategy), "shard_optimizer_over_replicas with strategy ",
          to_string(options.strategy), " of unit ", unit,
          ", which shards no optimizer state; use optim, optim_grads or optim_grads_params");
}

void check_wire(const Options& options, comm::PeerGroup& group, const std::string& unit) {
  const ScalarType wire = options.wire_dtype;
  require(wire == ScalarType::Float || wire == ScalarType::BFloat16, "wire_dtype is ", c10::toString(wire),
          " (unit ", unit, "); expected Float or BFloat16");
  if (wire == ScalarType::Float) return;
  require(shards_gradients(options.strategy) || options.accumulation_dtype == wire,
          "wire_dtype BFloat16 with strategy ", to_string(options.strategy), " (unit ", unit,
          "): its gradients stay where they are accumulated, in fp32; use Float, or optim_grads or "
          "optim_grads_params, or accumulation_dtype BFloat16");
  require(group.lanes().collectives() == nullptr, "wire_dtype BFloat16 over ", group.lanes().describe(),
          ": these add in bf16 on the way; use Float where GPUs do not address each other's memory");
}

void check_reshard(const Options& options, int ranks, const std::string& unit) {
  const int* inner = std::get_if<int>(&options.reshard_after_forward);
  if (inner == nullptr) return;
  require(*inner >= 1 && ranks % *inner == 0, "reshard_after_forward = ", *inner, " (unit ", unit, ") over ",
          ranks, " ranks; expected true, false, or a divisor of the ranks that shard");
  require(shards_parameters(options.strategy), "reshard_after_forward = ", *inner, " with strategy ",
          to_string(options.strategy), " (unit ", unit,
          "), whose weights stay; leave it out, or use optim_grads_params");
}

void check_accumulation(const Options& options, const RankGroups& ranks, const std::string& unit) {
  const ScalarType dtype = options.accumulation_dtype;
  require(dtype == ScalarType::Float || dtype == ScalarType::BFloat16, "accumulation_dtype is ",
          c10::toString(dtype), " (unit ", unit, "); expected Float or BFloat16");
  if (dtype == ScalarType::Float) return;
  require(ranks.replicate == nullptr, "accumulation_dtype BFloat16 (unit ", unit,
          ") on a mesh with the axis \"replicate\": sums over replicas are made of what a window has added "
          "up, in fp32; use Float");
  require(shards_gradients(options.strategy) || ranks.shard.lanes().collectives() == nullptr,
          "accumulation_dtype BFloat16 with strategy ", to_string(options.strategy), " (unit ", unit,
          ") over ", ranks.shard.lanes().describe(),
          ": these add in bf16 on the way; use Float where GPUs do not address each other's memory");
  require(!options.offload, "accumulation_dtype BFloat16 (unit ", unit,
          ") with offload: gradients come down in fp32, for the CPU's optimizer; use Float");
}

}  // namespace

void check_options(const Options& options, const RankGroups& ranks, const std::string& unit) {
  check_replicas(options, ranks, unit);
  require(!options.offload || shards_optimizer(options.strategy), "offload with strategy ",
          to_string(options.strategy), " (unit ", unit,
          "): every rank would update the whole model in host memory; use optim, optim_grads or "
          "optim_grads_params");
  require(!options.offload || options.main_weights == MainWeights::fp32,
          "offload with main_weights in model_dtype (unit ", unit,
          "): the CPU's optimizer updates fp32 weights with fp32 gradients; use MainWeights::fp32");
  require(!options.prefetch_bytes || *options.prefetch_bytes >= 0,
          "fully_shard: prefetch_bytes = ", options.prefetch_bytes.value_or(0),
          "; expected 0 or more, or nothing");
  require(!options.divisor || *options.divisor > 0, "fully_shard: divisor = ", options.divisor.value_or(1),
          "; expected a number above 0");
  require(!options.output_dtype || c10::isFloatingType(*options.output_dtype), "output_dtype is ",
          c10::toString(options.output_dtype.value_or(ScalarType::Float)), " (unit ", unit,
          "); expected a floating-point dtype");
  check_wire(options, ranks.shard, unit);
  check_accumulation(options, ranks, unit);
  check_reshard(options, ranks.shard.ranks(), unit);
}

}  // namespace fsdpp::runtime
