#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdpp/runtime/options.h"

namespace fsdpp::app {

struct ModelConfig {
  int64_t dim = 128;
  int64_t layers = 4;
  int64_t heads = 4;
  int64_t kv_heads = 4;
  int64_t ffn = 384;
  int64_t sequence = 128;
  bool tied = true;
  std::string recompute = "none";
  double rope_theta = 10000;
  double norm_eps = 1e-5;
};

struct TrainConfig {
  int64_t steps = 200;
  int64_t batch = 32;  // sequences per optimizer step, all ranks together
  int64_t microbatches = 1;
  double learning_rate = 3e-3;
  int64_t warmup_steps = 20;
  double min_lr_ratio = 0.1;
  double weight_decay = 0.1;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double clip_norm = 1.0;
  int64_t seed = 1;
  int64_t log_every = 10;
  int64_t eval_every = 100;
  int64_t eval_batches = 8;
};

struct DataConfig {
  std::string text;
  std::string cache = "build/data/tokens";
  double validation_fraction = 0.01;
};

struct ShardingConfig {
  std::string strategy = "optim_grads_params";
  std::string model_dtype = "auto";
  std::string main_weights = "fp32";
  std::string accumulation_dtype = "fp32";
  std::string wire_dtype = "fp32";
  std::string mesh = "flat";
  bool optimizer_over_replicas = false;
  std::string reshard_after_forward = "true";
  int64_t keep_gathered_mib = 0;
  bool fused = true;
  bool delay_wgrad = false;
  bool offload = false;
  double timeout_s = 60;
};

struct SampleConfig {
  int64_t bytes = 300;
  double temperature = 0.8;
  std::string prompt = "\n";
  int64_t seed = 1;
};

struct OutputConfig {
  std::string metrics;
  std::string results = "build/results/train.json";
};

/// Everything `fsdpp train` can be told. What each value means and may be: config_table.cpp.
struct Config {
  ModelConfig model;
  TrainConfig train;
  DataConfig data;
  ShardingConfig sharding;
  SampleConfig sample;
  OutputConfig output;
};

/// The replicas of ShardingConfig::mesh for `ranks` ranks: 1 of "flat", R of "RxS". Throws UsageError, as
/// below.
[[nodiscard]] int replicas_of(const ShardingConfig& sharding, int ranks);

/// What ShardingConfig::reshard_after_forward says. Throws UsageError, as below.
[[nodiscard]] runtime::Reshard reshard_of(const ShardingConfig& sharding);

/// Key and text of one value given on the command line.
using Override = std::pair<std::string, std::string>;

/// The whole of the file at `path`. Throws UsageError with one line that names it and why it cannot be read.
[[nodiscard]] std::string read_config(const std::string& path);

/// A path under which this process, what it becomes and what it starts read `content`, as long as any of them
/// lives: another's file may change meanwhile, and a pipe is read but once. Throws EnvironmentError when
/// there is no memory or descriptor left.
[[nodiscard]] std::string kept_config(const std::string& content);

/// Defaults, then the TOML `content` of the file `path`, then `overrides` in their order; each value checked
/// by itself. Throws UsageError with one line that names file and line, key, value, what was expected and the
/// remedy.
[[nodiscard]] Config load_config(const std::string& path, const std::string& content,
                                 const std::vector<Override>& overrides);

/// Checks the values against each other, against the number of ranks and against the file system, where the
/// file they come from is at `config_path` (empty: there is none). Throws UsageError with one line that names
/// keys, values and the remedy.
void check_config(const Config& config, const std::string& config_path, int ranks);

/// Checks that the text of `train_tokens` and `validation_tokens` is long enough. Throws UsageError as above.
void check_text(const Config& config, int64_t train_tokens, int64_t validation_tokens);

}  // namespace fsdpp::app
