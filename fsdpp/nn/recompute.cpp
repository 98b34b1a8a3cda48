#include "fsdpp/nn/recompute.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "fsdpp/base/error.h"
#include "fsdpp/nn/saved_tensor_hooks.h"
#include "fsdpp/runtime/segment.h"

namespace fsdpp::nn {
namespace {

using runtime::Segment;
using runtime::SegmentScope;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Body = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

constexpr std::array kNames = {"none", "reentrant", "non_reentrant"};  // as the enum

// Where the default generators stand, of the CPU and of one GPU.
class Randomness {
 public:
  explicit Randomness(const std::vector<at::Tensor>& inputs) {
    generators_.push_back(at::detail::getDefaultCPUGenerator());
    for (const at::Tensor& input : inputs) {
      if (!input.is_cuda()) continue;
      generators_.push_back(at::globalContext().defaultGenerator(input.device()));
      break;
    }
    states_ = read();
  }

  /// Puts the generators where they stood; returns where they stand now.
  [[nodiscard]] std::vector<at::Tensor> rewind() const {
    std::vector<at::Tensor> now = read();
    write(states_);
    return now;
  }
  void write(const std::vector<at::Tensor>& states) const {
    for (std::size_t i = 0; i < states.size(); ++i) {
      at::Generator generator = generators_[i];
      const std::lock_guard lock(generator.mutex());
      generator.set_state(states[i]);
    }
  }

 private:
  [[nodiscard]] std::vector<at::Tensor> read() const {
    std::vector<at::Tensor> states;
    for (at::Generator generator : generators_) {
      const std::lock_guard lock(generator.mutex());
      states.push_back(generator.get_state());
    }
    return states;
  }

  std::vector<at::Generator> generators_;
  std::vector<at::Tensor> states_;
};

// Autocast of the inputs' device, as it was.
class Autocast {
 public:
  explicit Autocast(const std::vector<at::Tensor>& inputs)
      : place_(inputs.empty() ? at::kCPU : inputs.front().device().type()),
        enabled_(at::autocast::is_autocast_enabled(place_)),
        dtype_(at::autocast::get_autocast_dtype(place_)) {}
  void set() const {
    at::autocast::set_autocast_enabled(place_, enabled_);
    at::autocast::set_autocast_dtype(place_, dtype_);
  }

 private:
  at::DeviceType place_;
  bool enabled_;
  at::ScalarType dtype_;
};

/// A part of a forward that can be run again as it ran first.
class Part {
 public:
  Part(Body body, const std::vector<at::Tensor>& inputs)
      : body_(std::move(body)), randomness_(inputs), autocast_(inputs) {
    for (const at::Tensor& input : inputs) requires_grad_.push_back(input.defined() && input.requires_grad());
  }

  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) const { return body_(inputs); }

  /// Leaves with the values of `inputs`.
  [[nodiscard]] std::vector<at::Tensor> leaves(const std::vector<at::Tensor>& inputs) const {
    std::vector<at::Tensor> leaves;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      leaves.push_back(inputs[i].defined() ? inputs[i].detach() : at::Tensor());
      if (requires_grad_[i]) leaves.back().requires_grad_();
    }
    return leaves;
  }

  std::vector<at::Tensor> run_again(const std::vector<at::Tensor>& inputs) const {
    const Restored restored(*this, inputs);
    const at::AutoGradMode with_graph(true);
    return body_(inputs);
  }

 private:
  class Restored {
   public:
    Restored(const Part& part, const std::vector<at::Tensor>& inputs)
        : part_(part), autocast_(inputs), now_(part.randomness_.rewind()) {
      part_.autocast_.set();
    }
    ~Restored() {
      part_.randomness_.write(now_);
      autocast_.set();
    }
    Restored(const Restored&) = delete;
    Restored& operator=(const Restored&) = delete;

   private:
    const Part& part_;
    Autocast autocast_;
    std::vector<at::Tensor> now_;
  };

  Body body_;
  Randomness randomness_;
  Autocast autocast_;
  std::vector<bool> requires_grad_;
};

struct ReentrantState final : torch::jit::CustomClassHolder {
  ReentrantState(Part given, std::shared_ptr<Segment> units)
      : part(std::move(given)), segment(std::move(units)) {}
  Part part;
  std::shared_ptr<Segment> segment;
};

class Reentrant : public torch::autograd::Function<Reentrant> {
 public:
  static variable_list forward(AutogradContext* context, const c10::intrusive_ptr<ReentrantState>& state,
                               at::TensorList inputs) {
    context->saved_data["state"] = c10::IValue::make_capsule(state);
    context->save_for_backward(inputs.vec());
    const SegmentScope scope(*state->segment);
    return state->part.run(inputs.vec());
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    require(!at::GradMode::is_enabled(),
            "reentrant recompute has no second derivative (create_graph); use Recompute::non_reentrant");
    const auto* state = static_cast<ReentrantState*>(context->saved_data["state"].toCapsule().get());
    const std::vector<at::Tensor> inputs = state->part.leaves(context->get_saved_variables());
    const std::vector<at::Tensor> outputs = state->part.run_again(inputs);
    variable_list roots;
    variable_list seeds;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (!outputs[i].requires_grad() || !gradients[i].defined()) continue;
      roots.push_back(outputs[i]);
      seeds.push_back(gradients[i]);
    }
    if (!roots.empty()) torch::autograd::backward(roots, seeds);
    state->segment->done();
    variable_list result(1);  // of the state
    for (const at::Tensor& input : inputs) result.push_back(input.defined() ? input.grad() : at::Tensor());
    return result;
  }
};

std::vector<at::Tensor> run_reentrant(const Body& body, const std::vector<at::Tensor>& inputs) {
  const bool any = std::any_of(inputs.begin(), inputs.end(), [](const at::Tensor& input) {
    return input.defined() && input.requires_grad();
  });
  require(any, "reentrant recompute: none of the ", inputs.size(),
          " inputs requires a gradient, so the weights inside would get none; use Recompute::non_reentrant");
  const auto segment = std::make_shared<Segment>();
  const auto outputs = Reentrant::apply(c10::make_intrusive<ReentrantState>(Part(body, inputs), segment),
                                        at::TensorList(inputs));
  for (const at::Tensor& output : outputs) {
    if (!output.defined() || !output.grad_fn()) continue;
    segment->returns_at(output.grad_fn().get());
    break;
  }
  return outputs;
}

// Thrown through `body` when everything that was saved is there again.
struct EnoughRecomputed {};

/// A part whose saved tensors are not kept.
class Frame : public std::enable_shared_from_this<Frame> {
 public:
  Frame(Part part, const std::vector<at::Tensor>& inputs)
      : part_(std::move(part)), inputs_(part_.leaves(inputs)) {}

  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs);
  at::Tensor unpack(std::size_t index);

 private:
  class Saved;
  class Captured;

  void run_again();

  Part part_;
  std::vector<at::Tensor> inputs_;
  std::size_t count_ = 0;           // tensors saved in the forward
  std::vector<at::Tensor> values_;  // of the last run again, but for those given out
};

/// One tensor that the forward saved: its number.
class Frame::Saved final : public torch::autograd::SavedVariableHooks {
 public:
  explicit Saved(std::shared_ptr<Frame> frame) : frame_(std::move(frame)) {}
  void call_pack_hook(const at::Tensor& /*tensor*/) override { index_ = frame_->count_++; }
  at::Tensor call_unpack_hook() override { return frame_->unpack(index_); }

 private:
  std::shared_ptr<Frame> frame_;
  std::size_t index_ = 0;
};

/// One that the second run saved: its value. The graph of that run is never used.
class Frame::Captured final : public torch::autograd::SavedVariableHooks {
 public:
  explicit Captured(std::vector<at::Tensor>& values, std::size_t count) : values_(values), count_(count) {}
  void call_pack_hook(const at::Tensor& tensor) override {
    values_.push_back(tensor.detach());
    if (values_.size() == count_) throw EnoughRecomputed{};
  }
  at::Tensor call_unpack_hook() override {
    throw UsageError("a backward inside a recomputed part is not supported; use Recompute::reentrant");
  }

 private:
  std::vector<at::Tensor>& values_;
  std::size_t count_;
};

std::vector<at::Tensor> Frame::run(const std::vector<at::Tensor>& inputs) {
  const SavedTensorHooksScope hooks([frame = shared_from_this()] { return std::make_unique<Saved>(frame); });
  return part_.run(inputs);
}

void Frame::run_again() {
  values_.clear();
  const SavedTensorHooksScope hooks([this] { return std::make_unique<Captured>(values_, count_); });
  try {
    static_cast<void>(part_.run_again(inputs_));
  } catch (const EnoughRecomputed&) {
    return;
  }
  throw UsageError(text("recompute: the first run saved ", count_, " tensors, the second one ",
                        values_.size(),
                        "; the body must do the same each time (no state that changes, no data-dependent "
                        "branch)"));
}

// Each is wanted once, as a rule: it goes when its user goes.
at::Tensor Frame::unpack(std::size_t index) {
  const bool here = index < values_.size() && values_[index].defined();
  if (!here) run_again();
  return std::exchange(values_[index], {});
}

}  // namespace

std::string to_string(Recompute how) { return kNames[static_cast<std::size_t>(how)]; }

Recompute recompute_from(const std::string& name) {
  std::string known;
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    if (name == kNames[i]) return static_cast<Recompute>(i);
    known += text(i == 0 ? "" : ", ", kNames[i]);
  }
  throw UsageError(text("recompute \"", name, "\" is unknown; expected one of ", known));
}

std::vector<at::Tensor> recompute(
    Recompute how, const std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>& body,
    const std::vector<at::Tensor>& inputs) {
  if (how == Recompute::none || !at::GradMode::is_enabled()) return body(inputs);
  if (how == Recompute::reentrant) return run_reentrant(body, inputs);
  return std::make_shared<Frame>(Part(body, inputs), inputs)->run(inputs);
}

at::Tensor recompute(Recompute how, const std::function<at::Tensor(const at::Tensor&)>& body,
                     const at::Tensor& input) {
  return recompute(how,
                   [body](const std::vector<at::Tensor>& inputs) {
                     return std::vector<at::Tensor>{body(inputs.front())};
                   },
                   {input})
      .front();
}

}  // namespace fsdpp::nn
