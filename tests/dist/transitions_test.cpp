// Every transition of a buffer between thread ranks, bit for bit, against sums made here one value at a time.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include "fsdpp/base/error.h"
#include "fsdpp/buffer/sharded_buffer.h"
#include "fsdpp/comm/connect.h"
#include "fsdpp/device/host.h"

namespace fsdpp::buffer {
namespace {

using device::Element;
using device::LaneKind;
using layout::Placement;

// As what values are stored and added, without our own conversions.
template <class T>
struct Dtype;
template <>
struct Dtype<float> {
  using Sum = float;
  static constexpr Element element = Element::fp32;
};
template <>
struct Dtype<c10::BFloat16> {
  using Sum = float;
  static constexpr Element element = Element::bf16;
};
template <>
struct Dtype<c10::Half> {
  using Sum = float;
  static constexpr Element element = Element::fp16;
};
template <>
struct Dtype<double> {
  using Sum = double;
  static constexpr Element element = Element::fp64;
};

/// Lanes that pull, as a GPU's do, on the host.
class PullingHost final : public device::Device {
 public:
  [[nodiscard]] int gpu() const noexcept override { return 0; }
  [[nodiscard]] bool runs_inline() const noexcept override { return true; }
  [[nodiscard]] const device::Kernels& kernels() const override { return device::host_kernels(); }

 protected:
  void submit(const device::Operation&, Work work) override {
    if (work) work();
  }
};

// Fewer rows than ranks, less than a shard, nothing at all; shards are cut inside rows.
std::vector<std::vector<layout::Shape>> shapes() {
  return {{{"wide", {2, 333}}, {"few", {3, 1}}, {"scalar", {}}, {"none", {0, 7}}, {"long", {9001}}},
          {{"scalar", {}}},
          {{"none", {0}}}};
}

// splitmix64: the same number for the same place, quickly.
uint64_t mixed(uint64_t x) {
  x += 0x9e3779b97f4a7c15U;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9U;
  x = (x ^ x >> 27) * 0x94d049bb133111ebU;
  return x ^ x >> 31;
}

// Magnitudes over 28 powers of two, all within fp16: sums of them round, in fp32 too.
template <class T>
T value(uint64_t place) {
  const uint64_t bits = mixed(place);
  const double magnitude =
      std::ldexp(static_cast<double>(bits >> 11) * 0x1p-53 + 0.5, static_cast<int>(mixed(bits) % 28) - 13);
  return static_cast<T>(bits % 2 == 0 ? magnitude : -magnitude);
}

template <class T>
T value_of(int rank, int parameter, int64_t i) {
  return value<T>(static_cast<uint64_t>((int64_t{rank} * 8 + parameter) * 100'000 + i));
}

// What the contributors' values of one element add up to, in the order given.
template <class T>
typename Dtype<T>::Sum sum_of(const std::vector<int>& order, int parameter, int64_t i) {
  using Sum = typename Dtype<T>::Sum;
  if (order.empty()) return 0;
  volatile Sum sum = static_cast<Sum>(value_of<T>(order.front(), parameter, i));
  for (std::size_t k = 1; k < order.size(); ++k)
    sum = sum + static_cast<Sum>(value_of<T>(order[k], parameter, i));
  return sum;
}

template <class Sum>
Sum scaled(Sum sum, double scale, bool add, Sum before) {
  volatile Sum product = static_cast<Sum>(scale) * sum;
  volatile Sum result = add ? before + product : product;
  return result;
}

template <class T>
bool same_bits(T a, T b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}

/// One rank's side of all transitions of one layout in one dtype.
template <class T>
class Rank {
 public:
  using Sum = typename Dtype<T>::Sum;

  Rank(comm::PeerGroup& group, std::vector<layout::Shape> parameters, bool pulling, int64_t room)
      : group_(group),
        layout_(std::make_shared<const layout::ShardLayout>(
            layout::ShardLayout::flat(std::move(parameters), sizeof(T), group.ranks()))),
        staging_(static_cast<std::size_t>((group.ranks() - 1) * room) * sizeof(T)) {
    if (pulling) {
      device_ = std::make_unique<PullingHost>();
    } else {
      device_ = std::make_unique<device::HostDevice>();
    }
    all_.resize(static_cast<std::size_t>(group.ranks()));
    std::iota(all_.begin(), all_.end(), 0);
  }

  void slice_and_gather() {
    const auto whole = memory<T>(layout_->full_numel());
    const auto shards = memory<T>(layout_->shard_numel());
    const auto full = memory<T>(layout_->full_numel());
    fill(*whole, 0);
    slice(route(), seen<T>(*whole, Placement::replicate), shards->peer(rank()));
    expect_shard(at<T>(*shards), [](int p, int64_t i) { return value_of<T>(0, p, i); });
    group_.barrier();
    gather(route(), seen<T>(*shards, Placement::shard), full->peer(rank()));
    expect_whole<T>(*full, [](int p, int64_t i) { return value_of<T>(0, p, i); });
    group_.barrier();
    // The shard lies in its place of the whole: only the others' come.
    poison(*full);
    std::memcpy(at<T>(*full) + rank() * layout_->shard_numel(), shards->peer(rank()),
                static_cast<std::size_t>(layout_->shard_numel()) * sizeof(T));
    group_.barrier();
    collect_regions(route(), seen<T>(*full, Placement::replicate));
    expect_whole<T>(*full, [](int p, int64_t i) { return value_of<T>(0, p, i); });
    group_.barrier();
  }

  void reduce_to_shards(const std::vector<int>& contributors, bool add) {
    const auto partial = contributions(contributors);
    std::vector<Sum> out(static_cast<std::size_t>(layout_->shard_numel()), add ? kBefore : Sum{NAN});
    std::vector<ReduceTarget> targets =
        whole_shard(*layout_, rank(), out.data(), sum_element(Dtype<T>::element));
    for (ReduceTarget& target : targets) target.add = add;
    reduce(route(), seen<T>(*partial, Placement::partial), targets, contributors, kScale);
    expect_shard(out.data(), [&](int p, int64_t i) {
      const Sum sum = sum_of<T>(contributors, p, i);
      return contributors.empty() && add ? kBefore : scaled<Sum>(sum, kScale, add, kBefore);
    });
    group_.barrier();
  }

  void all_reduce_to_wholes(const std::vector<int>& contributors, bool in_place) {
    const auto partial = contributions(contributors);
    const auto whole = in_place ? partial : memory<Sum>(layout_->full_numel());
    all_reduce(route(), seen<T>(*partial, Placement::partial), seen<Sum>(*whole, Placement::replicate),
               contributors, kScale, [&] { group_.barrier(); });
    expect_whole<Sum>(*whole, [&](int p, int64_t i) {
      return scaled<Sum>(sum_of<T>(contributors, p, i), kScale, false, 0);
    });
    group_.barrier();
  }

  // A sum in another order would not go unnoticed.
  void expect_that_order_matters() {
    if (group_.ranks() < 3 || layout_->parameter_numel(0) < 100) return;
    const std::vector<int> backwards(all_.rbegin(), all_.rend());
    int differ = 0;
    for (int64_t i = 0; i < layout_->parameter_numel(0); ++i)
      differ += same_bits(sum_of<T>(all_, 0, i), sum_of<T>(backwards, 0, i)) ? 0 : 1;
    EXPECT_GT(differ, 10);
  }

  void run() {
    slice_and_gather();
    expect_that_order_matters();
    std::vector<int> some = all_;
    some.erase(some.begin() + static_cast<std::ptrdiff_t>(some.size() / 2));
    for (const std::vector<int>& contributors : {all_, some, std::vector<int>{}}) {
      for (const bool add : {false, true}) reduce_to_shards(contributors, add);
      all_reduce_to_wholes(contributors, false);
      if (std::is_same_v<T, Sum>) all_reduce_to_wholes(contributors, true);
    }
  }

 private:
  static constexpr double kScale = 1.0 / 3;
  static constexpr Sum kBefore = Sum{1} / 7;

  [[nodiscard]] int rank() const { return group_.rank(); }
  [[nodiscard]] Route route() { return {*device_, LaneKind::reduce, nullptr, staging_}; }

  // One part per rank, all NaN.
  template <class Number>
  [[nodiscard]] std::shared_ptr<comm::PeerMemory> memory(int64_t count) {
    auto made = group_.allocate(static_cast<std::size_t>(count) * sizeof(Number) + 1, "a test");
    poison(*made);
    group_.barrier();
    return made;
  }
  void poison(const comm::PeerMemory& memory) { std::memset(memory.peer(rank()), 0xFF, memory.bytes()); }
  template <class Number>
  [[nodiscard]] Number* at(const comm::PeerMemory& memory) const {
    return reinterpret_cast<Number*>(memory.peer(rank()));
  }
  template <class Number>
  [[nodiscard]] ShardedBuffer seen(const comm::PeerMemory& memory, Placement placement) const {
    std::vector<std::byte*> parts;
    for (int peer = 0; peer < group_.ranks(); ++peer) parts.push_back(memory.peer(peer));
    return {"test", layout_, placement, group_.rank(), Dtype<Number>::element, std::move(parts)};
  }
  // `whose` values of all parameters; padding stays NaN.
  void fill(const comm::PeerMemory& memory, int whose) {
    for (int p = 0; p < static_cast<int>(layout_->parameters().size()); ++p) {
      for (int64_t i = 0; i < layout_->parameter_numel(p); ++i)
        at<T>(memory)[layout_->parameter_offset(p) + i] = value_of<T>(whose, p, i);
    }
  }
  // Every contributor's own values; who does not contribute holds NaN.
  [[nodiscard]] std::shared_ptr<comm::PeerMemory> contributions(const std::vector<int>& contributors) {
    auto partial = memory<T>(layout_->full_numel());
    if (std::find(contributors.begin(), contributors.end(), rank()) != contributors.end())
      fill(*partial, rank());
    group_.barrier();
    return partial;
  }
  // Counts and goes on: ranks stay in step.
  template <class Number, class Expected>
  void expect_whole(const comm::PeerMemory& memory, const Expected& expected) {
    int64_t wrong = 0;
    for (int p = 0; p < static_cast<int>(layout_->parameters().size()); ++p) {
      const Number* actual = at<Number>(memory) + layout_->parameter_offset(p);
      for (int64_t i = 0; i < layout_->parameter_numel(p); ++i)
        wrong += same_bits(actual[i], Number{expected(p, i)}) ? 0 : 1;
    }
    EXPECT_EQ(wrong, 0) << "elements of rank " << rank() << "'s whole";
  }
  template <class Number, class Expected>
  void expect_shard(const Number* shard, const Expected& expected) {
    int64_t wrong = 0;
    for (const layout::Segment& s : layout_->segments(rank())) {
      for (int64_t i = 0; i < s.count; ++i) {
        const Number value = expected(s.parameter, s.parameter_offset + i);
        wrong += same_bits(shard[s.shard_offset + i], value) ? 0 : 1;
      }
    }
    EXPECT_EQ(wrong, 0) << "elements of rank " << rank() << "'s shard";
  }

  comm::PeerGroup& group_;
  std::shared_ptr<const layout::ShardLayout> layout_;
  std::vector<std::byte> staging_;
  std::unique_ptr<device::Device> device_;
  std::vector<int> all_;
};

template <class T>
class Transitions : public testing::Test {};
using Dtypes = testing::Types<float, c10::BFloat16, c10::Half, double>;
struct Name {
  template <class T>
  static std::string GetName(int) {
    return to_string(Dtype<T>::element);
  }
};
TYPED_TEST_SUITE(Transitions, Dtypes, Name);

TYPED_TEST(Transitions, HaveTheBitsOfOneValueAtATimeOnAnyNumberOfRanks) {
  for (const int ranks : {1, 2, 3, 4, 8}) {
    comm::run_thread_ranks(ranks, [&](comm::PeerGroup& group) {
      for (const auto& parameters : shapes()) {
        SCOPED_TRACE(text(ranks, " ranks, ", parameters.size(), " parameters"));
        Rank<TypeParam>(group, parameters, false, 0).run();
      }
    });
  }
}

// As on a GPU: whole runs are pulled near, at once or piece by piece, and added from there.
TYPED_TEST(Transitions, HaveTheSameBitsWherePeersArePulled) {
  for (const int ranks : {1, 2, 3, 4, 8}) {
    for (const int64_t room : {64, 4096}) {
      comm::run_thread_ranks(ranks, [&](comm::PeerGroup& group) {
        for (const auto& parameters : shapes()) {
          SCOPED_TRACE(text(ranks, " ranks, ", parameters.size(), " parameters, room for ", room));
          Rank<TypeParam>(group, parameters, true, room).run();
        }
      });
    }
  }
}

}  // namespace
}  // namespace fsdpp::buffer
