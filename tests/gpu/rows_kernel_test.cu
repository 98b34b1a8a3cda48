// Rows gathered and summed on the GPU: the same bits as on the host.
#include <cuda_fp16.h>

#include <algorithm>
#include <memory>
#include <numeric>

#include "fsdpp/device/cuda_rows.h"
#include "tests/gpu/device_memory.cuh"

namespace fsdpp::gpu_test {
namespace {

using device::Element;
using device::RowGradients;
using device::RowTable;

constexpr int64_t kRows = 613;

struct Shape {
  int ranks;
  int64_t dim;
  int64_t step;  // shards are a multiple of it long
  int64_t rows = kRows;
};

// The last two: cuts that no vector fits, and rows that span several shards.
constexpr Shape kShapes[] = {{1, 8, 64},   {2, 64, 64},   {3, 20, 64},   {8, 72, 128},
                             {2, 1, 64},   {4, 33, 128},  {2, 7, 1},     {2, 4096, 128},
                             {5, 1000, 8}, {16, 3000, 1}, {16, 96, 8, 3}};

int64_t shard_elements(const Shape& shape) {
  const int64_t even = (shape.rows * shape.dim + shape.ranks - 1) / shape.ranks;
  return (even + shape.step - 1) / shape.step * shape.step;
}

// Small ids often; the last rows never. `often`: the id of every second look-up, or -1.
std::vector<int64_t> random_ids(int64_t count, int64_t often, int64_t rows) {
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t id = random_below(random_below(std::max<int64_t>(2, rows - 5)) + 1);
    ids.push_back(often >= 0 && random_below(2) == 0 ? often : id);
  }
  return ids;
}

std::vector<unsigned char> random_bytes(int64_t count) {
  std::vector<unsigned char> bytes(static_cast<std::size_t>(count));
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random_engine()());
  return bytes;
}

void check_gather(const Shape& shape, Element element, int64_t count, int64_t out_offset) {
  const auto size = static_cast<int64_t>(device::element_size(element));
  RowTable host;
  host.shard_elements = shard_elements(shape);
  host.rows = shape.rows;
  host.dim = shape.dim;
  host.element = element;
  RowTable device = host;
  std::vector<std::vector<unsigned char>> bytes;
  std::vector<std::unique_ptr<Memory<unsigned char>>> shards;
  for (int r = 0; r < shape.ranks; ++r) {
    bytes.push_back(random_bytes(host.shard_elements * size));
    shards.push_back(std::make_unique<Memory<unsigned char>>(bytes[r]));
    host.shards[r] = bytes[r].data();
    device.shards[r] = shards[r]->data();
  }
  std::vector<int64_t> ids = random_ids(count, -1, shape.rows);
  if (count > 1) ids[0] = shape.rows - 1;
  const Memory<int64_t> device_ids(ids);
  Memory<unsigned char> out(count * shape.dim * size, out_offset * size);
  device::cuda_gather_rows(nullptr, out.data(), device_ids.data(), count, device);
  std::vector<unsigned char> expected(static_cast<std::size_t>(out.size()));
  device::gather_rows(expected.data(), ids, host);
  EXPECT_EQ(first_difference(out.download(), expected), -1)
      << shape.ranks << " ranks, dim " << shape.dim << ", count " << count << ", offset " << out_offset;
  EXPECT_TRUE(out.guards_intact());
}

TEST(GatherRowsKernel, CopiesTheRowsOfTheHost) {
  FSDPP_NEED_GPU();
  for (const Shape& shape : kShapes) {
    for (const Element element : {Element::bf16, Element::fp16, Element::fp32}) {
      for (const int64_t count : {0, 1, 300}) check_gather(shape, element, count, 0);
      check_gather(shape, element, 17, 1);
    }
  }
}

// All ranks' ids and gradients on host and device.
struct Lookups {
  Lookups(const Shape& shape, Element element, int64_t per_rank, int64_t often) {
    host.ranks = shape.ranks;
    host.dim = shape.dim;
    host.element = element;
    for (int r = 0; r < shape.ranks; ++r) {
      host.counts[r] = r == 1 ? 0 : per_rank + r;
      const std::vector<float> values = random_floats(host.counts[r] * shape.dim, 3);
      std::vector<unsigned char>& raw = bytes.emplace_back(values.size() * device::element_size(element));
      if (element == Element::fp32) {
        std::memcpy(raw.data(), values.data(), raw.size());
      } else {
        for (std::size_t i = 0; i < values.size(); ++i) {
          const uint16_t half = __half_as_ushort(__float2half_rn(values[i]));
          const uint16_t bits = element == Element::bf16 ? to_bf16(values[i]) : half;
          std::memcpy(raw.data() + 2 * i, &bits, 2);
        }
      }
      host.gradients[r] = raw.data();
    }
    device = host;
    for (int r = 0; r < shape.ranks; ++r) {
      memory.push_back(std::make_unique<Memory<unsigned char>>(bytes[r]));
      device.gradients[r] = memory[r]->data();
    }
    const int64_t total = std::accumulate(host.counts, host.counts + shape.ranks, int64_t{0});
    const std::vector<int64_t> ids = random_ids(total, often, shape.rows);
    order.resize(ids.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return ids[a] < ids[b]; });
    for (const int64_t position : order) sorted.push_back(ids[position]);
    device_order = std::make_unique<Memory<int64_t>>(order);
    device_sorted = std::make_unique<Memory<int64_t>>(sorted);
  }
  RowGradients host;
  RowGradients device;
  std::vector<std::vector<unsigned char>> bytes;
  std::vector<std::unique_ptr<Memory<unsigned char>>> memory;
  std::vector<int64_t> order;
  std::vector<int64_t> sorted;
  std::unique_ptr<Memory<int64_t>> device_order;
  std::unique_ptr<Memory<int64_t>> device_sorted;
};

void check_add(const Shape& shape, const Lookups& lookups, bool add) {
  const auto total = static_cast<int64_t>(lookups.sorted.size());
  const int64_t count = shard_elements(shape);
  const float scale = 1.0F / 3;
  for (int r = 0; r < shape.ranks; ++r) {
    Memory<float> out(count);
    std::vector<float> expected = out.download();  // NaNs: rows that no id names keep them
    if (add) expected = random_floats(count);
    const std::vector<float> before = expected;
    device::add_rows({expected.data(), r * count, count},
                     {lookups.sorted.data(), lookups.order.data(), total}, lookups.host, scale, add);
    for (int repeat = 0; repeat < 2; ++repeat) {
      out.upload(before);
      device::cuda_add_rows(nullptr, {out.data(), r * count, count},
                            {lookups.device_sorted->data(), lookups.device_order->data(), total},
                            lookups.device, scale, add);
      ASSERT_EQ(first_difference(out.download(), expected), -1)
          << "rank " << r << " of " << shape.ranks << ", dim " << shape.dim << ", ids " << total << ", add "
          << add;
      EXPECT_TRUE(out.guards_intact());
    }
  }
}

TEST(AddRowsKernel, HasTheHostsBits) {
  FSDPP_NEED_GPU();
  for (const Shape& shape : kShapes) {
    for (const Element element : {Element::bf16, Element::fp16, Element::fp32}) {
      for (const int64_t per_rank : {0, 1, 90}) {
        const Lookups lookups(shape, element, per_rank, -1);
        for (const bool add : {false, true}) check_add(shape, lookups, add);
      }
    }
  }
}

TEST(AddRowsKernel, HasTheHostsBitsForRowsThatOccurOften) {
  FSDPP_NEED_GPU();
  for (const Shape& shape : {Shape{1, 8, 64}, Shape{2, 64, 64}, Shape{4, 33, 128}, Shape{3, 104, 1}}) {
    for (const Element element : {Element::bf16, Element::fp16, Element::fp32}) {
      for (const int64_t often : {int64_t{0}, kRows / 2, kRows - 1}) {
        const Lookups lookups(shape, element, 2'100, often);
        for (const bool add : {false, true}) check_add(shape, lookups, add);
      }
    }
  }
}

// Runs of one length each around the length at which the second kernel takes over, at all places.
TEST(AddRowsKernel, EveryRunLengthIsSummedOnce) {
  FSDPP_NEED_GPU();
  const Shape shape = {1, 40, 64};
  for (const int64_t length : {1, 2, 31, 32, 33, 63, 64, 65, 66, 127, 128, 129, 200}) {
    Lookups lookups(shape, Element::bf16, 3'000, -1);
    for (std::size_t i = 0; i < lookups.sorted.size(); ++i)
      lookups.sorted[i] = std::min<int64_t>((static_cast<int64_t>(i) + 7) / length, kRows - 1);
    lookups.device_sorted->upload(lookups.sorted);
    check_add(shape, lookups, true);
  }
}

}  // namespace
}  // namespace fsdpp::gpu_test
