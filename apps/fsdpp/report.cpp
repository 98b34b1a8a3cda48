#include "apps/fsdpp/report.h"

#include "fsdpp/base/bytes.h"
#include "fsdpp/base/error.h"
#include "fsdpp/comm/peer_group.h"
#include "fsdpp/observe/table.h"

namespace fsdpp::app {
namespace {

using observe::Table;
using observe::with_commas;

constexpr int64_t kFp32Bytes = 4;
constexpr int64_t kAdamStates = 2;  // first and second moment, fp32 each

int64_t parameters_of(const runtime::ShardedModel& sharded) {
  int64_t count = 0;
  for (const auto& unit : sharded.units()) count += unit.parameters;
  return count;
}

int64_t adam_bytes(const runtime::ShardedModel& sharded) {
  int64_t elements = 0;
  for (const at::Tensor& shard : sharded.shards()) elements += shard.numel();
  return elements * kAdamStates * kFp32Bytes;
}

std::string percent(int64_t part, int64_t whole) {
  return text(whole > 0 ? (1000 * part / whole + 5) / 10 : 0, " %");
}

std::string unit_table(const runtime::ShardedModel& sharded) {
  Table table({"unit", "parameters", "bytes", "padding"});
  runtime::UnitReport total{.name = "total"};
  const auto add = [&](const runtime::UnitReport& unit) {
    table.row({unit.name.empty() ? "(root)" : unit.name, with_commas(unit.parameters),
               with_commas(unit.bytes), with_commas(unit.padding_bytes)});
  };
  for (const auto& unit : sharded.units()) {
    add(unit);
    total.parameters += unit.parameters;
    total.bytes += unit.bytes;
    total.padding_bytes += unit.padding_bytes;
  }
  table.rule();
  add(total);
  return table.str();
}

std::string purpose_table(const runtime::ShardedModel& sharded) {
  Table table({"per rank", "bytes"});
  for (const auto& [purpose, bytes] : sharded.memory().by_purpose()) table.row({purpose, human_bytes(bytes)});
  table.row({"AdamW state", human_bytes(adam_bytes(sharded))});
  return table.str();
}

std::string device_line(const Place& place, const runtime::ShardedModel& sharded, comm::PeerGroup& group) {
  const bool bf16 = sharded.options().model_dtype == at::kBFloat16;
  const bool main = sharded.options().main_weights == runtime::MainWeights::fp32;
  const char* numbers = !bf16  ? ", fp32"
                        : main ? ", bf16 with fp32 main weights"
                               : ", bf16, main weights too";
  return text(place.gpu < 0  ? "CPU"
              : place.shared ? "GPUs that ranks share"
                             : "a GPU per rank",
              numbers, ", lanes through ", group.lanes().describe(),
              place.note.empty() ? "" : "; on CPUs since ", place.note);
}

}  // namespace

std::string start_report(const Config& config, const Place& place, const runtime::ShardedModel& sharded,
                         const data::Corpus& corpus) {
  const int64_t parameters = parameters_of(sharded);
  const auto split = corpus.split(config.data.validation_fraction);
  const int64_t step_tokens = config.train.batch * config.model.sequence;
  comm::PeerGroup& group = sharded.group();
  std::string out;
  out +=
      text("model   Llama, ", with_commas(parameters), " parameters, ", human_bytes(parameters * kFp32Bytes),
           " in fp32: ", config.model.layers, " layers of width ", config.model.dim, "\n");
  out += text("ranks   ", group.ranks(), " over ", group.describe(), ", strategy ", config.sharding.strategy,
              config.sharding.mesh == "flat" ? "" : text(", mesh ", config.sharding.mesh),
              config.sharding.optimizer_over_replicas ? " that shard the optimizer state too" : "",
              config.sharding.fused ? ", fused weight gradients\n" : "\n");
  out += text("device  ", device_line(place, sharded, group), "\n");
  out += text("text    ", config.data.text, ": ", with_commas(static_cast<long long>(split.train.size())),
              " tokens to learn, ", with_commas(static_cast<long long>(split.validation.size())),
              " for validation\n");
  out += text("steps   ", with_commas(config.train.steps), " of ", config.train.batch, " sequences of ",
              config.model.sequence, " tokens: ", with_commas(step_tokens), " tokens per step, ",
              with_commas(step_tokens * config.train.steps), " in all\n\n");
  out += unit_table(sharded) + "\n";
  out += "memory plan, " + sharded.memory_plan() + "\n";
  return out + purpose_table(sharded);
}

Held held(const runtime::ShardedModel& sharded) {
  return {.per_rank = sharded.memory().peak() + adam_bytes(sharded),
          .one_alone = parameters_of(sharded) * kFp32Bytes * (2 + kAdamStates)};
}

std::string memory_report(const runtime::ShardedModel& sharded, const Memory& memory) {
  const Held bytes = held(sharded);
  std::string out = text("memory  ", human_bytes(bytes.per_rank),
                         " per rank at most for weights, gradients and AdamW; ", "one rank alone would hold ",
                         human_bytes(bytes.one_alone), " (", percent(bytes.per_rank, bytes.one_alone), ")\n");
  out += purpose_table(sharded) + "\n";
  std::vector<std::string> head = {"process", "resident", "at most", "without files", "its share"};
  if (!memory.gpus.empty()) head.emplace_back("GPU, by all");
  Table table(head);
  for (size_t rank = 0; rank < memory.processes.size(); ++rank) {
    const auto& r = memory.processes[rank];
    std::vector<std::string> row = {text("rank ", rank), human_bytes(r.now), human_bytes(r.peak),
                                    human_bytes(r.own), human_bytes(r.proportional)};
    if (!memory.gpus.empty()) row.push_back(human_bytes(memory.gpus[rank]));
    table.row(row);
  }
  return out + table.str();
}

}  // namespace fsdpp::app
