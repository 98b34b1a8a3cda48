#include "tests/support/integer_model.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>

namespace fsdpp::test {
namespace {

class Bounded : public torch::autograd::Function<Bounded> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x > 0});
    return at::relu(x).floor().clamp_max(3);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    return {gradients[0].round().clamp(-2, 2) * context->get_saved_variables()[0]};
  }
};

at::Tensor integers(int64_t low, int64_t high, at::IntArrayRef sizes, at::ScalarType dtype, uint64_t seed) {
  const at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randint(low, high + 1, sizes, generator, at::TensorOptions().dtype(dtype));
}

// The proof that a computation has no rounding: what is added are multiples of 2^-fraction_bits, and the sum
// of their magnitudes, thus any partial sum, stays below 2^24 of these.
class Exactness {
 public:
  // `magnitudes`: sums of absolute values of the terms.
  void sum(const at::Tensor& magnitudes, int fraction_bits, const std::string& what) const {
    const double largest = magnitudes.numel() == 0 ? 0 : magnitudes.max().item<double>();
    EXPECT_LT(std::ldexp(largest, fraction_bits), std::ldexp(1.0, 24)) << what << " may round in fp32";
  }

  static int fraction_bits(const at::Tensor& values) {
    for (int bits = 0; bits <= 40; ++bits) {
      const at::Tensor scaled = values.detach() * std::ldexp(1.0, bits);
      if ((scaled == scaled.floor()).all().item<bool>()) return bits;
    }
    ADD_FAILURE() << "a value is no multiple of 2^-40";
    return 40;
  }

  // y = x w^T + b, and later the gradients of all three.
  void linear(const at::Tensor& x, const at::Tensor& w, const at::Tensor& b, const at::Tensor& y,
              const std::string& what) const {
    const at::Tensor bias =
        b.defined() ? b.detach().abs() : at::zeros({w.size(0)}, w.options().requires_grad(false));
    const int bits = fraction_bits(x) + fraction_bits(w);
    sum(at::linear(x.detach().abs(), w.detach().abs(), bias), std::max(bits, fraction_bits(bias)), what);
    y.register_hook([this, what, xs = x.detach().reshape({-1, x.size(-1)}),
                     ws = w.detach()](const at::Tensor& grad) {
      const at::Tensor g = grad.detach().reshape({-1, grad.size(-1)});
      sum(at::mm(g.abs().t(), xs.abs()), fraction_bits(g) + fraction_bits(xs), what + ", weight gradient");
      sum(at::mm(g.abs(), ws.abs()), fraction_bits(g) + fraction_bits(ws), what + ", input gradient");
      sum(g.abs().sum(0), fraction_bits(g), what + ", bias gradient");
    });
  }

  void embedding(const at::Tensor& tokens, const at::Tensor& w, const at::Tensor& y) const {
    y.register_hook([this, indices = tokens.reshape({-1}), rows = w.size(0)](const at::Tensor& grad) {
      const at::Tensor g = grad.detach().reshape({-1, grad.size(-1)});
      const at::Tensor sums = at::zeros({rows, g.size(1)}, g.options());
      sum(sums.index_add(0, indices, g.abs()), fraction_bits(g), "embedding gradient");
    });
  }
};

at::Tensor oracle_loss(const IntegerModel& model, const std::vector<at::Tensor>& w, const IntegerBatch& batch,
                       const Exactness* proof) {
  const auto linear = [&](const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                          const std::string& what) {
    const at::Tensor y = at::linear(x, weight, bias.defined() ? std::optional(bias) : std::nullopt);
    if (proof != nullptr) proof->linear(x, weight, bias, y, what);
    return y;
  };
  const at::Tensor rows = at::embedding(w[0], batch.tokens);
  if (proof != nullptr) proof->embedding(batch.tokens, w[0], rows);
  at::Tensor x = bounded(rows);
  for (int i = 0; i < model.blocks; ++i) {
    const std::string name = "block " + std::to_string(i);
    const at::Tensor* own = &w[1 + 3 * static_cast<std::size_t>(i)];
    const at::Tensor h = bounded(linear(x, own[0], own[1], name + " first"));
    x = bounded(linear(h, own[2], {}, name + " second") + x);
  }
  const at::Tensor terms = linear(x, model.tied ? w[0] : w.back(), {}, "head") * batch.coefficients;
  if (proof != nullptr) proof->sum(terms.detach().abs().sum(), Exactness::fraction_bits(terms), "loss");
  return terms.sum();
}

IntegerBatch whole_batch(const IntegerModel& model, int step, int pieces, at::ScalarType dtype) {
  std::vector<at::Tensor> tokens, coefficients;
  for (int piece = 0; piece < pieces; ++piece) {
    const IntegerBatch batch = integer_batch(model, step, piece);
    tokens.push_back(batch.tokens);
    coefficients.push_back(batch.coefficients);
  }
  return {at::cat(tokens), at::cat(coefficients).to(dtype)};
}

std::vector<OracleStep> train(const IntegerModel& model, const Descent& descent, at::ScalarType dtype,
                              const Exactness* proof) {
  std::vector<at::Tensor> weights;
  for (const auto& [name, value] : integer_weights(model))
    weights.push_back(value.to(dtype).requires_grad_());
  std::vector<OracleStep> steps;
  for (int step = 0; step < descent.steps; ++step) {
    const at::Tensor loss =
        oracle_loss(model, weights, whole_batch(model, step, descent.pieces, dtype), proof);
    loss.backward();
    OracleStep result{.loss = loss.item<double>()};
    for (at::Tensor& weight : weights) {
      const at::Tensor gradient = weight.grad() / descent.divisor;
      EXPECT_TRUE(gradient.ne(0).any().item<bool>())
          << "a weight without a gradient tests nothing, step " << step;
      at::Tensor updated = (weight.detach() - descent.rate * gradient).requires_grad_();
      if (proof != nullptr) {
        proof->sum(weight.detach().abs() + descent.rate * gradient.abs(), Exactness::fraction_bits(updated),
                   "update");
      }
      weight = updated;
      result.gradients.push_back(gradient);
      result.weights.push_back(updated.detach());
    }
    steps.push_back(std::move(result));
  }
  return steps;
}

}  // namespace

at::Tensor bounded(const at::Tensor& x) { return Bounded::apply(x); }

NamedTensors integer_weights(const IntegerModel& model) {
  NamedTensors result;
  const auto add = [&](const std::string& name, at::IntArrayRef sizes) {
    result.emplace_back(name, integers(-1, 1, sizes, at::kFloat, 1000 + result.size()));
  };
  add("embedding.weight", {model.vocabulary, model.dim});
  for (int i = 0; i < model.blocks; ++i) {
    const std::string block = "blocks." + std::to_string(i);
    add(block + ".first.weight", {model.hidden, model.dim});
    add(block + ".first.bias", {model.hidden});
    add(block + ".second.weight", {model.dim, model.hidden});
  }
  if (!model.tied) add("head.weight", {model.vocabulary, model.dim});
  return result;
}

IntegerBatch integer_batch(const IntegerModel& model, int step, int index) {
  const auto seed = static_cast<uint64_t>(10000 + 100 * step + index);
  return {integers(0, model.vocabulary - 1, {2, 3}, at::kLong, seed),
          integers(-1, 1, {2, 3, model.vocabulary}, at::kFloat, seed + 5000)};
}

std::vector<OracleStep> integer_oracle(const IntegerModel& model, const Descent& descent) {
  const Exactness proof;
  const std::vector<OracleStep> wide = train(model, descent, at::kDouble, &proof);
  std::vector<OracleStep> narrow = train(model, descent, at::kFloat, nullptr);
  const auto same = [](const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const at::Tensor& x, const at::Tensor& y) {
      return x.scalar_type() == at::kFloat && x.to(at::kDouble).equal(y);
    });
  };
  for (std::size_t i = 0; i < wide.size(); ++i) {
    EXPECT_EQ(narrow[i].loss, wide[i].loss) << "step " << i;
    EXPECT_TRUE(same(narrow[i].gradients, wide[i].gradients))
        << "fp32 and fp64 gradients differ in step " << i;
    EXPECT_TRUE(same(narrow[i].weights, wide[i].weights)) << "fp32 and fp64 weights differ in step " << i;
  }
  return narrow;
}

}  // namespace fsdpp::test
