#include "apps/fsdpp/sample.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "fsdpp/base/error.h"
#include "fsdpp/base/interrupt.h"
#include "fsdpp/data/tokenizer.h"
#include "fsdpp/runtime/call.h"

namespace fsdpp::app {
namespace {

constexpr int64_t kBytes = 256;  // token ids that are bytes: a sample holds no document boundary

int64_t next_byte(const at::Tensor& logits, double temperature, at::Generator& generator) {
  const at::Tensor last = logits.select(0, 0).select(0, -1).slice(0, 0, kBytes).to(at::kCPU, at::kDouble);
  if (temperature == 0) return at::argmax(last).item<int64_t>();
  const at::Tensor probabilities = at::softmax((last - last.max()) / temperature, 0);
  return at::multinomial(probabilities, 1, /*replacement=*/false, generator).item<int64_t>();
}

}  // namespace

std::string write_sample(nn::Llama& model, const SampleConfig& config, at::Device place, int64_t window,
                         bool writer) {
  const at::NoGradGuard no_gradients;
  at::Generator generator = at::detail::createCPUGenerator(static_cast<uint64_t>(config.seed));
  std::vector<int64_t> tokens = {data::ByteTokenizer::kBoundary};
  for (const data::Token token : data::ByteTokenizer::encode(config.prompt)) tokens.push_back(token);
  for (int64_t i = 0; i < config.bytes; ++i) {
    if (interrupted()) throw Interrupted("stopped while writing the sample");
    const size_t context = writer ? std::min(tokens.size(), static_cast<size_t>(window)) : 1;
    const at::Tensor inputs = at::tensor(std::span(tokens).last(context), at::kLong).unsqueeze(0);
    const at::Tensor logits = call(model, inputs.to(place), at::Tensor());
    if (writer) tokens.push_back(next_byte(logits, config.temperature, generator));
  }
  return writer ? data::ByteTokenizer::decode(std::span<const int64_t>(tokens)) : "";
}

}  // namespace fsdpp::app
