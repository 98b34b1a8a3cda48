// What single values cannot say: how they fit each other, the ranks and the text.
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <vector>

#include "apps/fsdpp/config.h"
#include "fsdpp/base/error.h"
#include "fsdpp/runtime/options.h"

namespace fsdpp::app {
namespace {

namespace fs = std::filesystem;

void check_model(const ModelConfig& m) {
  const int64_t even = (m.dim / (2 * m.heads) + 1) * 2 * m.heads;  // the next width with heads of even size
  require(m.dim % m.heads == 0, "model.heads = ", m.heads, " does not divide model.dim = ", m.dim,
          ": expected a divisor of model.dim; set model.heads or model.dim, for example model.dim = ", even);
  require(m.heads % m.kv_heads == 0, "model.kv_heads = ", m.kv_heads,
          " does not divide model.heads = ", m.heads,
          ": expected a divisor of model.heads; set model.kv_heads, for example to ", m.heads);
  require(m.dim / m.heads % 2 == 0, "model.dim = ", m.dim, " and model.heads = ", m.heads,
          " make heads of odd size ", m.dim / m.heads,
          ": expected an even size, since rotary positions turn pairs; set model.dim, for example to ", even);
}

void check_train(const TrainConfig& t, int ranks) {
  const int64_t parts = ranks * t.microbatches;
  require(t.batch % parts == 0, "train.batch = ", t.batch,
          " is not divisible by ranks * train.microbatches = ", ranks, " * ", t.microbatches, " = ", parts,
          ": expected a multiple; set train.batch, for example to ", (t.batch / parts + 1) * parts);
  require(t.warmup_steps <= t.steps, "train.warmup_steps = ", t.warmup_steps,
          " is more than train.steps = ", t.steps,
          ": expected at most as many; set train.warmup_steps, for example to ", t.steps / 10);
}

void check_sharding(const ShardingConfig& s, int ranks) {
  const int replicas = replicas_of(s, ranks);
  require(!s.optimizer_over_replicas || replicas > 1,
          "sharding.optimizer_over_replicas = true with sharding.mesh = \"", s.mesh,
          "\": there are no replicas; set sharding.mesh to RxS with 2 or more replicas R, or leave it out");
  require(!s.optimizer_over_replicas || runtime::shards_optimizer(runtime::strategy_from(s.strategy)),
          "sharding.optimizer_over_replicas = true with sharding.strategy = \"", s.strategy,
          "\", which shards no optimizer state: set sharding.strategy to optim, optim_grads or "
          "optim_grads_params");
  const runtime::Reshard reshard = reshard_of(s);
  const int* inner = std::get_if<int>(&reshard);
  const int sharding = ranks / replicas;
  require(inner == nullptr || sharding % *inner == 0,
          "sharding.reshard_after_forward = ", s.reshard_after_forward, " does not divide the ", sharding,
          " ranks that shard together: set it to a divisor of them, or to true or false");
  require(inner == nullptr || runtime::shards_parameters(runtime::strategy_from(s.strategy)),
          "sharding.reshard_after_forward = ", s.reshard_after_forward, " with sharding.strategy = \"",
          s.strategy, "\", whose weights stay: leave it out, or set sharding.strategy to optim_grads_params");
  require(
      s.wire_dtype == "fp32" || s.accumulation_dtype == "bf16" ||
          runtime::shards_gradients(runtime::strategy_from(s.strategy)),
      "sharding.wire_dtype = \"", s.wire_dtype, "\" with sharding.strategy = \"", s.strategy,
      "\", whose gradients stay where they are added up: expected fp32; set sharding.wire_dtype to fp32, or "
      "sharding.strategy to optim_grads or optim_grads_params");
}

void check_offload(const ShardingConfig& s) {
  require(!s.offload || runtime::shards_optimizer(runtime::strategy_from(s.strategy)),
          "sharding.offload = true with sharding.strategy = \"", s.strategy,
          "\": every rank would update the whole model in host memory; set sharding.strategy to optim, "
          "optim_grads or optim_grads_params");
  require(!s.offload || (s.main_weights == "fp32" && s.accumulation_dtype == "fp32"),
          "sharding.offload = true with sharding.main_weights = \"", s.main_weights,
          "\" and sharding.accumulation_dtype = \"", s.accumulation_dtype,
          "\": the CPU updates fp32 weights with fp32 gradients; set both to fp32");
}

void check_accumulation(const ShardingConfig& s, int ranks) {
  require(
      s.accumulation_dtype == "fp32" || replicas_of(s, ranks) == 1, "sharding.accumulation_dtype = \"",
      s.accumulation_dtype, "\" with sharding.mesh = \"", s.mesh,
      "\": replicas are summed in fp32; set sharding.accumulation_dtype to fp32, or sharding.mesh to flat");
}

void check_paths(const DataConfig& d) {
  require(!d.text.empty(),
          "data.text is not set: expected a text file, .gz or .dz file, or a folder of such; ",
          "give --data.text PATH");
  std::error_code error;
  const auto status = fs::status(d.text, error);
  const bool there = fs::is_regular_file(status) || fs::is_directory(status);
  const bool readable = there && access(d.text.c_str(), R_OK) == 0;
  if (there && !readable) error = std::error_code(errno, std::generic_category());
  require(readable, "data.text = \"", d.text, "\": ", error ? error.message() : "is no file or folder",
          "; expected a readable text file, .gz or .dz file, or a folder of such: correct data.text");
  require(!d.cache.empty(),
          "data.cache = \"\": expected a folder for token files; leave it out for the default");
}

/// An output that could not be written at the end would be noticed too late.
void check_output(const char* key, const std::string& path) {
  if (path.empty()) return;
  std::error_code error;
  fs::path folder = fs::path(path).parent_path();
  if (folder.empty()) folder = ".";
  fs::create_directories(folder, error);
  if (!error) {
    std::error_code unknown;
    const auto status = fs::status(path, unknown);
    const std::string written = fs::exists(status) ? path : folder.string();
    if (status.type() == fs::file_type::none) {
      error = unknown;
    } else if (fs::is_directory(status)) {
      error = std::make_error_code(std::errc::is_a_directory);
    } else if (access(folder.c_str(), X_OK) != 0 || access(written.c_str(), W_OK) != 0) {
      error = std::error_code(errno, std::generic_category());
    }
  }
  require(!error, key, " = \"", path, "\": ", error.message(),
          "; expected a file in a writable folder: correct ", key);
}

struct Named {
  const char* key;
  const std::string& path;
};

/// Nobody wants a text or a configuration overwritten, or two outputs in one file.
void check_apart(const std::vector<Named>& outputs, std::vector<Named> others) {
  for (const Named& output : outputs) {
    if (output.path.empty()) continue;
    for (const Named& other : others) {
      std::error_code error;
      const bool same = !other.path.empty() &&
                        fs::weakly_canonical(output.path, error) == fs::weakly_canonical(other.path, error);
      const bool device = fs::exists(output.path, error) && !fs::is_regular_file(output.path, error);
      require(device || !(same || fs::equivalent(output.path, other.path, error)), output.key, " = \"",
              output.path, "\" is ", other.key,
              " too, which would be overwritten; expected another file: correct ", output.key);
    }
    others.push_back(output);
  }
}

}  // namespace

runtime::Reshard reshard_of(const ShardingConfig& sharding) {
  const std::string& value = sharding.reshard_after_forward;
  if (value == "true" || value == "false") return value == "true";
  int size = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), size);
  require(error == std::errc() && end == value.data() + value.size() && size > 0,
          "sharding.reshard_after_forward = \"", value,
          "\": expected true, false, or a number of neighbouring ranks; set it to true for the default");
  return size;
}

int replicas_of(const ShardingConfig& sharding, int ranks) {
  if (sharding.mesh == "flat") return 1;
  int replicas = 0;
  int shards = 0;
  int read = 0;
  const bool shape = std::sscanf(sharding.mesh.c_str(), "%5dx%5d%n", &replicas, &shards, &read) == 2 &&
                     static_cast<std::size_t>(read) == sharding.mesh.size() && replicas > 0 && shards > 0;
  require(shape && replicas * shards == ranks, "sharding.mesh = \"", sharding.mesh, "\" with ", ranks,
          " ranks: expected flat, or RxS (R replicas of S ranks that shard) with R * S = ", ranks,
          "; write for example ", ranks % 2 == 0 ? text("2x", ranks / 2) : text("1x", ranks));
  return replicas;
}

void check_config(const Config& config, const std::string& config_path, int ranks) {
  check_model(config.model);
  check_train(config.train, ranks);
  check_sharding(config.sharding, ranks);
  check_offload(config.sharding);
  check_accumulation(config.sharding, ranks);
  check_paths(config.data);
  check_output("output.metrics", config.output.metrics);
  check_output("output.results", config.output.results);
  check_apart({{"output.metrics", config.output.metrics}, {"output.results", config.output.results}},
              {{"data.text", config.data.text}, {"--config", config_path}});
}

void check_text(const Config& config, int64_t train_tokens, int64_t validation_tokens) {
  const int64_t needed = config.model.sequence + 1;  // a target for each input
  require(train_tokens >= needed, "model.sequence = ", config.model.sequence,
          " is longer than the text: data.text = \"", config.data.text, "\" has ", train_tokens,
          " tokens for training, ", needed, " are needed; shorten model.sequence or give more text");
  require(validation_tokens >= needed, "model.sequence = ", config.model.sequence,
          " is longer than the validation text: data.validation_fraction = ", config.data.validation_fraction,
          " of data.text = \"", config.data.text, "\" is ", validation_tokens, " tokens, ", needed,
          " are needed; raise data.validation_fraction, shorten model.sequence or give more text");
}

}  // namespace fsdpp::app
