#include <utility>

#include "fsdpp/runtime/reducer.h"

namespace fsdpp::runtime {
namespace {

/// The reducers of a model whose units have several strategies: each group's own does the work.
class StrategyReducer final : public Reducer {
 public:
  explicit StrategyReducer(std::map<Strategy, std::shared_ptr<Reducer>> of) : of_(std::move(of)) {
    for (const auto& [strategy, reducer] : of_) {
      if (all_.empty() || all_.back() != reducer.get()) all_.push_back(reducer.get());
    }
  }

  GradSink open(Parameter& parameter) override { return at(*parameter.group).open(parameter); }
  void contribute(Parameter& parameter, const RowWriter& write) override {
    at(*parameter.group).contribute(parameter, write);
  }
  void begin(bool last) override {
    for (Reducer* reducer : all_) reducer->begin(last);
  }
  void cleared() override {
    for (Reducer* reducer : all_) reducer->cleared();
  }
  void forget() override {
    for (Reducer* reducer : all_) reducer->forget();
  }
  void check(ParameterGroup& group) override { at(group).check(group); }
  [[nodiscard]] const Parameter* partial() const override {
    for (const Reducer* reducer : all_) {
      if (const Parameter* found = reducer->partial()) return found;
    }
    return nullptr;
  }
  void reduce(ParameterGroup& group) override { at(group).reduce(group); }
  void finish() override {
    for (Reducer* reducer : all_) reducer->finish();
  }
  [[nodiscard]] std::span<const SlotUse> uses() const noexcept override {
    for (const Reducer* reducer : all_) {
      if (!reducer->uses().empty()) return reducer->uses();
    }
    return {};
  }
  [[nodiscard]] int64_t spills() const noexcept override {
    int64_t sum = 0;
    for (const Reducer* reducer : all_) sum += reducer->spills();
    return sum;
  }

 private:
  Reducer& at(const ParameterGroup& group) { return *of_.at(group.strategy); }

  std::map<Strategy, std::shared_ptr<Reducer>> of_;
  std::vector<Reducer*> all_;
};

}  // namespace

std::unique_ptr<Reducer> make_strategy_reducer(std::map<Strategy, std::shared_ptr<Reducer>> of) {
  return std::make_unique<StrategyReducer>(std::move(of));
}

}  // namespace fsdpp::runtime
