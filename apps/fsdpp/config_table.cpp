#include "apps/fsdpp/config_table.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <numeric>

#include "fsdpp/base/error.h"

namespace fsdpp::app {
namespace {

template <auto Section, auto Member>
Slot slot(Config& config) {
  return &((config.*Section).*Member);
}

constexpr double kMany = 1e9;  // no sensible value of a whole number is larger

Check from(double minimum, double maximum) { return {.minimum = minimum, .maximum = maximum}; }
Check above(double minimum, double maximum) {
  return {.minimum = minimum, .maximum = maximum, .above_minimum = true};
}
Check within(double minimum, double maximum) {
  return {.minimum = minimum, .maximum = maximum, .below_maximum = true};
}
Check choice(std::vector<std::string_view> names) { return {.choices = std::move(names)}; }

#define FSDPP_SLOT(section, Struct, name) slot<&Config::section, &Struct::name>
#define MODEL(name) "model." #name, FSDPP_SLOT(model, ModelConfig, name)
#define TRAIN(name) "train." #name, FSDPP_SLOT(train, TrainConfig, name)
#define DATA(name) "data." #name, FSDPP_SLOT(data, DataConfig, name)
#define SHARDING(name) "sharding." #name, FSDPP_SLOT(sharding, ShardingConfig, name)
#define SAMPLE(name) "sample." #name, FSDPP_SLOT(sample, SampleConfig, name)
#define OUTPUT(name) "output." #name, FSDPP_SLOT(output, OutputConfig, name)

const std::array kEntries = {
    Entry{MODEL(dim), from(1, 1 << 20), "width of the model"},
    Entry{MODEL(layers), from(1, 10000), "transformer blocks"},
    Entry{MODEL(heads), from(1, 1 << 16), "query heads; must divide model.dim into heads of even size"},
    Entry{MODEL(kv_heads), from(1, 1 << 16), "key and value heads; must divide model.heads"},
    Entry{MODEL(ffn), from(1, 1 << 22), "inner width of the feed-forward part"},
    Entry{MODEL(sequence), from(1, 1 << 20), "tokens per training sequence"},
    Entry{MODEL(tied), {}, "the head uses the embedding's weight"},
    Entry{MODEL(recompute), choice({"none", "reentrant", "non_reentrant"}),
          "each block's activations are computed again in the backward instead of kept"},
    Entry{MODEL(rope_theta), above(0, 1e12), "base of the rotary positions"},
    Entry{MODEL(norm_eps), above(0, 1), "epsilon of the RMS norms"},

    Entry{TRAIN(steps), from(1, kMany), "optimizer steps"},
    Entry{TRAIN(batch), from(1, 1 << 24), "sequences per optimizer step, all ranks together"},
    Entry{TRAIN(microbatches), from(1, 1 << 16), "parts in which a rank computes its share of the batch"},
    Entry{TRAIN(learning_rate), above(0, 100), "highest learning rate"},
    Entry{TRAIN(warmup_steps), from(0, kMany), "steps of linear warm-up"},
    Entry{TRAIN(min_lr_ratio), from(0, 1), "last learning rate as a part of the highest (cosine in between)"},
    Entry{TRAIN(weight_decay), from(0, 100), "AdamW's decoupled weight decay"},
    Entry{TRAIN(beta1), within(0, 1), "AdamW's first moment"},
    Entry{TRAIN(beta2), within(0, 1), "AdamW's second moment"},
    Entry{TRAIN(clip_norm), above(0, 1e9), "largest global gradient norm"},
    Entry{TRAIN(seed), from(0, kMany), "of weights and batches"},
    Entry{TRAIN(log_every), from(1, kMany), "steps between two lines of progress and metrics"},
    Entry{TRAIN(eval_every), from(0, kMany), "steps between two validations; 0: at the end only"},
    Entry{TRAIN(eval_batches), from(1, kMany), "batches per validation, each of train.batch sequences"},

    Entry{DATA(text), {}, "text to learn: a file, .gz or .dz file, or folder of such"},
    Entry{DATA(cache), {}, "folder of token files made from texts"},
    Entry{DATA(validation_fraction), above(0, 0.5), "part of the text that is kept for validation"},

    Entry{SHARDING(strategy), choice({"optim_grads_params", "optim_grads", "optim", "no_shard"}),
          "what is sharded over the ranks"},
    Entry{
        SHARDING(mesh),
        {},
        "flat: all ranks shard together; RxS: R replicas of S neighbouring ranks that shard everything among "
        "themselves (a hybrid mesh)"},
    Entry{SHARDING(optimizer_over_replicas),
          {},
          "optimizer state and main weights are sharded over replicas too"},
    Entry{SHARDING(reshard_after_forward),
          {.plain = true},
          "true: full weights are gathered again for the backward, from all ranks; false: they stay; n: they "
          "lie sharded over n neighbouring ranks in between"},
    Entry{SHARDING(model_dtype), choice({"auto", "fp32", "bf16"}),
          "of the weights that the model computes with; auto: bf16 on GPUs, fp32 on CPUs"},
    Entry{SHARDING(main_weights), choice({"fp32", "model_dtype"}), "of the weights that AdamW updates"},
    Entry{SHARDING(accumulation_dtype), choice({"fp32", "bf16"}), "of gradients while microbatches add up"},
    Entry{SHARDING(wire_dtype), choice({"fp32", "bf16"}),
          "of gradients on their way to the rank that owns them; they are summed in fp32"},
    Entry{
        SHARDING(keep_gathered_mib), from(-1, kMany),
        "MiB of full weights that stay where they are, gathered once per step instead of in each forward and "
        "backward; -1: all"},
    Entry{SHARDING(fused), {}, "weight gradients are written straight into the reduce's input"},
    Entry{SHARDING(delay_wgrad), {}, "weight gradients are computed after the backward, by backward_dw()"},
    Entry{SHARDING(offload),
          {},
          "main weights and optimizer state lie in host memory, where the CPU updates them"},
    Entry{SHARDING(timeout_s), above(0, 1e6), "seconds to wait for another rank"},

    Entry{SAMPLE(bytes), from(0, 1 << 20), "length of the text written by the model at the end"},
    Entry{SAMPLE(temperature), from(0, 100), "0: always the likeliest byte"},
    Entry{SAMPLE(prompt), {}, "text that the sample continues"},
    Entry{SAMPLE(seed), from(0, kMany), "of the sample"},

    Entry{OUTPUT(metrics), {}, "file of JSON lines, one per logged step; empty: none"},
    Entry{OUTPUT(results), {}, "file of the run's results, one JSON object; empty: none"},
};

std::string number_text(double value) {
  std::array<char, 40> out{};
  const auto end = std::to_chars(out.data(), out.data() + out.size(), value).ptr;
  return {out.data(), end};
}

std::string shown(const Scalar& value) {
  if (const auto* whole = std::get_if<int64_t>(&value)) return std::to_string(*whole);
  if (const auto* number = std::get_if<double>(&value)) {
    const std::string digits = number_text(*number);
    return digits.find_first_not_of("-0123456789") == std::string::npos ? digits + ".0" : digits;
  }
  if (const auto* truth = std::get_if<bool>(&value)) return *truth ? "true" : "false";
  std::string text = "\"";  // on one line, whatever the text holds
  for (const char c : std::get<std::string>(value)) {
    const auto byte = static_cast<unsigned char>(c);
    std::array<char, 8> escaped{c};
    if (c == '\n')
      std::snprintf(escaped.data(), escaped.size(), "\\n");
    else if (byte < 0x20 || byte == 0x7F)
      std::snprintf(escaped.data(), escaped.size(), "\\x%02x", byte);
    text += escaped.data();
  }
  return text + "\"";
}

Scalar default_of(const Entry& entry) {
  Config config;
  return std::visit([](auto* variable) -> Scalar { return *variable; }, entry.slot(config));
}

/// A value that is right, to be shown in a remedy.
std::string example(const Entry& entry) {
  const Scalar value = default_of(entry);
  const auto* name = std::get_if<std::string>(&value);
  return name != nullptr && name->empty() ? "\"PATH\"" : shown(value);
}

bool in_bounds(const Check& check, double value) {
  if (check.minimum == check.maximum) return true;
  return (check.above_minimum ? value > check.minimum : value >= check.minimum) &&
         (check.below_maximum ? value < check.maximum : value <= check.maximum);
}

bool store(int64_t* variable, const Scalar& value, const Check& check) {
  const auto* whole = std::get_if<int64_t>(&value);
  if (whole == nullptr || !in_bounds(check, static_cast<double>(*whole))) return false;
  *variable = *whole;
  return true;
}

bool store(double* variable, const Scalar& value, const Check& check) {
  double number = std::nan("");
  if (const auto* whole = std::get_if<int64_t>(&value)) number = static_cast<double>(*whole);
  if (const auto* real = std::get_if<double>(&value)) number = *real;
  if (!std::isfinite(number) || !in_bounds(check, number)) return false;
  *variable = number;
  return true;
}

bool store(bool* variable, const Scalar& value, const Check& /*check*/) {
  const auto* truth = std::get_if<bool>(&value);
  if (truth != nullptr) *variable = *truth;
  return truth != nullptr;
}

bool store(std::string* variable, const Scalar& value, const Check& check) {
  const bool plain = check.plain && !std::holds_alternative<std::string>(value);
  const Scalar given = plain ? Scalar{shown(value)} : value;
  const auto* name = std::get_if<std::string>(&given);
  const auto& choices = check.choices;
  if (name == nullptr) return false;
  if (!choices.empty() && std::find(choices.begin(), choices.end(), *name) == choices.end()) return false;
  *variable = *name;
  return true;
}

template <class Number>
bool parse(const std::string& text, Number* value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return error == std::errc() && end == text.data() + text.size();
}

/// The text of a command line as the kind that the row wants; what does not parse stays a text and is refused
/// then.
Scalar parsed(const Entry& entry, const std::string& text) {
  Config config;
  const Slot slot = entry.slot(config);
  int64_t whole = 0;
  double number = 0;
  if (std::holds_alternative<int64_t*>(slot) && parse(text, &whole)) return whole;
  if (std::holds_alternative<double*>(slot) && parse(text, &number)) return number;
  if (std::holds_alternative<bool*>(slot) && (text == "true" || text == "false")) return text == "true";
  return text;
}

int edit_distance(std::string_view a, std::string_view b) {
  std::vector<int> row(b.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (size_t i = 0; i < a.size(); ++i) {
    int diagonal = row[0];
    row[0] = static_cast<int>(i) + 1;
    for (size_t j = 0; j < b.size(); ++j) {
      const int change = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({change, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

}  // namespace

std::span<const Entry> entries() { return kEntries; }

const Entry* find_entry(std::string_view key) {
  const auto found =
      std::find_if(kEntries.begin(), kEntries.end(), [&](const Entry& e) { return e.key == key; });
  return found == kEntries.end() ? nullptr : &*found;
}

std::string expected(const Entry& entry) {
  const Check& check = entry.check;
  const Scalar kind = default_of(entry);
  if (std::holds_alternative<bool>(kind)) return "true or false";
  if (std::holds_alternative<std::string>(kind)) {
    std::string names;
    for (const auto name : check.choices) names += (names.empty() ? "one of " : ", ") + std::string(name);
    return names.empty() ? "a text" : names;
  }
  if (std::holds_alternative<int64_t>(kind)) {
    return text("a whole number from ", static_cast<int64_t>(check.minimum), " to ",
                static_cast<int64_t>(check.maximum));
  }
  return text("a number ", check.above_minimum ? "above " : "from ", number_text(check.minimum),
              check.below_maximum ? " and below " : " to ", number_text(check.maximum));
}

std::string default_text(const Entry& entry) {
  const Scalar value = default_of(entry);
  const auto* name = std::get_if<std::string>(&value);
  return name != nullptr && name->empty() ? "" : shown(value);
}

void assign(Config& config, const Entry& entry, const Scalar& value, const std::string& where) {
  if (std::visit([&](auto* variable) { return store(variable, value, entry.check); }, entry.slot(config)))
    return;
  const std::string name(entry.key.substr(entry.key.find('.') + 1));
  throw UsageError(text(where, ": ", entry.key, " = ", shown(value), ": expected ", expected(entry),
                        "; write for example ", name, " = ", example(entry)));
}

void assign_text(Config& config, const Entry& entry, const std::string& value) {
  const Scalar scalar = parsed(entry, value);
  if (std::visit([&](auto* variable) { return store(variable, scalar, entry.check); }, entry.slot(config)))
    return;
  throw UsageError(text("--", entry.key, " ", shown(scalar), ": expected ", expected(entry),
                        "; write for example --", entry.key, " ", example(entry)));
}

std::string nearest(std::string_view word, const std::vector<std::string>& names) {
  // A third of the letters may be wrong; a bare name is compared with the names behind the dots.
  int best = (static_cast<int>(word.size()) + 1) / 3 + 1;
  std::string found;
  for (const auto& name : names) {
    int distance = edit_distance(word, name);
    const size_t dot = name.find('.');
    if (dot != std::string::npos && word.find('.') == std::string_view::npos) {
      distance = std::min(distance, edit_distance(word, std::string_view(name).substr(dot + 1)));
    }
    if (distance < best) {
      best = distance;
      found = name;
    }
  }
  return found;
}

std::string suggestion(std::string_view word, const std::vector<std::string>& names) {
  const std::string near = nearest(word, names);
  return near.empty() ? "; see fsdpp train --help" : "; did you mean " + near + "?";
}

std::vector<std::string> keys() {
  std::vector<std::string> out;
  for (const Entry& entry : kEntries) out.emplace_back(entry.key);
  return out;
}

std::vector<std::string> sections() {
  std::vector<std::string> out;
  for (const Entry& entry : kEntries) {
    const std::string section(entry.key.substr(0, entry.key.find('.')));
    if (out.empty() || out.back() != section) out.push_back(section);
  }
  return out;
}

}  // namespace fsdpp::app
