// Signals between "ranks" that are streams of one GPU, each with its own pad.
#include <memory>
#include <vector>

#include "fsdpp/base/error.h"
#include "fsdpp/comm/cuda_signals.h"
#include "fsdpp/device/cuda_delay.h"
#include "tests/gpu/device_memory.cuh"

namespace fsdpp::gpu_test {
namespace {

using comm::BoardView;

constexpr int kChannels = 3;

__global__ void increment_kernel(int64_t* value) { ++*value; }

// log[*lines] = *value, and one line more.
__global__ void log_kernel(const int64_t* value, int64_t* log, int64_t* lines) { log[(*lines)++] = *value; }

// A word that host and device see.
class HostWord {
 public:
  HostWord() {
    FSDPP_CUDA(cudaHostAlloc(&word_, sizeof(uint32_t), cudaHostAllocMapped));
    *word_ = 0;
  }
  ~HostWord() { cudaFreeHost(word_); }
  HostWord(const HostWord&) = delete;
  HostWord& operator=(const HostWord&) = delete;
  void set() { *const_cast<volatile uint32_t*>(word_) = 1; }
  [[nodiscard]] const uint32_t* data() const { return word_; }

 private:
  uint32_t* word_ = nullptr;
};

// Whether the stream has work left. That it has is no error to be found by the next launch.
bool is_busy(cudaStream_t stream) {
  const cudaError_t status = cudaStreamQuery(stream);
  cudaGetLastError();
  return status == cudaErrorNotReady;
}

// Ranks of one board, each with a stream. All counters begin at `start`.
class Ranks {
 public:
  explicit Ranks(int ranks, uint32_t start = 0) {
    comm::load_signal_kernels();
    device::load_spin_kernel();
    cudaFuncAttributes attributes{};
    FSDPP_CUDA(cudaFuncGetAttributes(&attributes, increment_kernel));
    FSDPP_CUDA(cudaFuncGetAttributes(&attributes, log_kernel));
    for (int r = 0; r < ranks; ++r) {
      pads_.push_back(std::make_unique<Memory<uint32_t>>(
          std::vector<uint32_t>(static_cast<std::size_t>(ranks * kChannels), start)));
      own_.push_back(std::make_unique<Memory<uint32_t>>(std::vector<uint32_t>(kChannels, start)));
      FSDPP_CUDA(cudaStreamCreateWithFlags(&streams_.emplace_back(), cudaStreamNonBlocking));
    }
    for (int r = 0; r < ranks; ++r) {
      BoardView& view = views_.emplace_back();
      for (int p = 0; p < ranks; ++p) view.pads[p] = pads_[p]->data();
      view.own = own_[r]->data();
      view.rank = r;
      view.ranks = ranks;
      view.channels = kChannels;
    }
  }
  ~Ranks() {
    cudaDeviceSynchronize();
    for (cudaStream_t stream : streams_) cudaStreamDestroy(stream);
  }
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  [[nodiscard]] cudaStream_t stream(int rank) const { return streams_[rank]; }
  [[nodiscard]] const BoardView& view(int rank) const { return views_[rank]; }
  // Says so to all, then waits for all.
  void meet(int rank, int channel) const {
    comm::cuda_signal(stream(rank), view(rank), channel);
    comm::cuda_wait(stream(rank), view(rank), channel, 0, static_cast<int>(views_.size()));
  }
  void synchronize() const { FSDPP_CUDA(cudaDeviceSynchronize()); }
  [[nodiscard]] std::vector<uint32_t> pad(int rank) const { return pads_[rank]->download(); }
  [[nodiscard]] std::vector<uint32_t> own(int rank) const { return own_[rank]->download(); }

 private:
  std::vector<std::unique_ptr<Memory<uint32_t>>> pads_;
  std::vector<std::unique_ptr<Memory<uint32_t>>> own_;
  std::vector<cudaStream_t> streams_;
  std::vector<BoardView> views_;
};

TEST(SignalKernels, AWaitHoldsBackWhatFollowsUntilThePeersWorkIsDone) {
  FSDPP_NEED_GPU();
  const Ranks ranks(2);
  const Memory<int64_t> value(std::vector<int64_t>{0});
  const Memory<int64_t> log(1);
  const Memory<int64_t> lines(std::vector<int64_t>{0});
  // Rank 1 begins its delay only when rank 0 is at its wait: without the wait, rank 0 would log the 0.
  comm::cuda_signal(ranks.stream(0), ranks.view(0), 0);
  comm::cuda_signal(ranks.stream(0), ranks.view(0), 1);
  comm::cuda_wait(ranks.stream(0), ranks.view(0), 0, 0, 2);
  log_kernel<<<1, 1, 0, ranks.stream(0)>>>(value.data(), log.data(), lines.data());
  comm::cuda_signal(ranks.stream(1), ranks.view(1), 1);
  comm::cuda_wait(ranks.stream(1), ranks.view(1), 1, 0, 1);
  device::cuda_spin(ranks.stream(1), 20'000);
  increment_kernel<<<1, 1, 0, ranks.stream(1)>>>(value.data());
  comm::cuda_signal(ranks.stream(1), ranks.view(1), 0);
  FSDPP_CUDA(cudaGetLastError());
  ranks.synchronize();
  EXPECT_EQ(log.download()[0], 1);
  EXPECT_EQ(ranks.own(0), (std::vector<uint32_t>{1, 1, 0}));
  EXPECT_EQ(ranks.pad(0), (std::vector<uint32_t>{0, 0, 0, 1, 1, 0}));
  EXPECT_EQ(ranks.pad(1), (std::vector<uint32_t>{1, 1, 0, 0, 0, 0}));
}

TEST(SignalKernels, WaitsOnlyForTheRanksNamed) {
  FSDPP_NEED_GPU();
  const Ranks ranks(4);
  comm::cuda_signal(ranks.stream(2), ranks.view(2), 2);
  ranks.synchronize();
  comm::cuda_signal(ranks.stream(0), ranks.view(0), 2);
  comm::cuda_wait(ranks.stream(0), ranks.view(0), 2, 2, 1);  // ranks 1 and 3 never signal
  comm::cuda_wait(ranks.stream(0), ranks.view(0), 2, 0, 1);  // ourselves: no wait
  comm::cuda_wait(ranks.stream(0), ranks.view(0), 1, 0, 4);  // nobody has signalled, nor have we
  comm::cuda_wait(ranks.stream(0), ranks.view(0), 2, 1, 0);  // nobody
  ranks.synchronize();
}

// Every rank in turn is the slow one; each adds to its number, and after the barrier all numbers must be
// seen.
void run_barriers(const Ranks& ranks, int count, int rounds) {
  std::vector<std::unique_ptr<Memory<int64_t>>> values;
  std::vector<std::unique_ptr<Memory<int64_t>>> logs;
  std::vector<std::unique_ptr<Memory<int64_t>>> lines;
  for (int r = 0; r < count; ++r) {
    values.push_back(std::make_unique<Memory<int64_t>>(std::vector<int64_t>{0}));
    logs.push_back(std::make_unique<Memory<int64_t>>(static_cast<int64_t>(rounds) * count));
    lines.push_back(std::make_unique<Memory<int64_t>>(std::vector<int64_t>{0}));
  }
  for (int round = 0; round < rounds; ++round) {
    for (int r = 0; r < count; ++r) {
      if (round % count == r) device::cuda_spin(ranks.stream(r), 100);
      increment_kernel<<<1, 1, 0, ranks.stream(r)>>>(values[r]->data());
      ranks.meet(r, 0);
      for (int p = 0; p < count; ++p)
        log_kernel<<<1, 1, 0, ranks.stream(r)>>>(values[p]->data(), logs[r]->data(), lines[r]->data());
      ranks.meet(r, 1);
    }
  }
  FSDPP_CUDA(cudaGetLastError());
  ranks.synchronize();
  for (int r = 0; r < count; ++r) {
    const std::vector<int64_t> log = logs[r]->download();
    for (int round = 0; round < rounds; ++round) {
      for (int p = 0; p < count; ++p)
        ASSERT_EQ(log[round * count + p], round + 1) << "rank " << r << " of " << p;
    }
  }
}

TEST(SignalKernels, ABarrierOrdersAllRanks) {
  FSDPP_NEED_GPU();
  run_barriers(Ranks(2), 2, 50);
  run_barriers(Ranks(4), 4, 50);
  run_barriers(Ranks(1), 1, 3);
}

TEST(SignalKernels, CountersMayWrapAround) {
  FSDPP_NEED_GPU();
  const Ranks ranks(2, 0xFFFFFFFEU);
  run_barriers(ranks, 2, 5);
  EXPECT_EQ(ranks.own(0)[0], 3U);
  EXPECT_EQ(ranks.pad(1)[0], 3U);
}

TEST(SignalKernels, ACapturedGraphCanBeReplayed) {
  FSDPP_NEED_GPU();
  constexpr int kReplays = 6;
  const Ranks ranks(2);
  const Memory<int64_t> values[2] = {Memory<int64_t>(std::vector<int64_t>{0}),
                                     Memory<int64_t>(std::vector<int64_t>{0})};
  const Memory<int64_t> lines[2] = {Memory<int64_t>(std::vector<int64_t>{0}),
                                    Memory<int64_t>(std::vector<int64_t>{0})};
  const Memory<int64_t> logs[2] = {Memory<int64_t>(kReplays), Memory<int64_t>(kReplays)};
  cudaGraph_t graphs[2];
  cudaGraphExec_t replays[2];
  for (int r = 0; r < 2; ++r) {
    FSDPP_CUDA(cudaStreamBeginCapture(ranks.stream(r), cudaStreamCaptureModeThreadLocal));
    increment_kernel<<<1, 1, 0, ranks.stream(r)>>>(values[r].data());
    comm::cuda_signal(ranks.stream(r), ranks.view(r), 0);
    comm::cuda_wait(ranks.stream(r), ranks.view(r), 0, 0, 2);
    log_kernel<<<1, 1, 0, ranks.stream(r)>>>(values[1 - r].data(), logs[r].data(), lines[r].data());
    ranks.meet(r, 1);
    FSDPP_CUDA(cudaStreamEndCapture(ranks.stream(r), &graphs[r]));
    FSDPP_CUDA(cudaGraphInstantiate(&replays[r], graphs[r], 0));
    FSDPP_CUDA(cudaGraphUpload(replays[r], ranks.stream(r)));
  }
  ranks.synchronize();
  for (int replay = 0; replay < kReplays; ++replay) {
    for (int r = 0; r < 2; ++r) FSDPP_CUDA(cudaGraphLaunch(replays[r], ranks.stream(r)));
  }
  ranks.synchronize();
  for (int r = 0; r < 2; ++r) {
    EXPECT_EQ(logs[r].download(), (std::vector<int64_t>{1, 2, 3, 4, 5, 6})) << "rank " << r;
    EXPECT_EQ(ranks.own(r), (std::vector<uint32_t>{kReplays, kReplays, 0}));
    FSDPP_CUDA(cudaGraphExecDestroy(replays[r]));
    FSDPP_CUDA(cudaGraphDestroy(graphs[r]));
  }
}

TEST(SignalKernels, RefusesWhatTheBoardLacks) {
  FSDPP_NEED_GPU();
  const Ranks ranks(2);
  EXPECT_THROW(comm::cuda_signal(ranks.stream(0), ranks.view(0), kChannels), UsageError);
  EXPECT_THROW(comm::cuda_wait(ranks.stream(0), ranks.view(0), -1, 0, 1), UsageError);
  EXPECT_THROW(comm::cuda_wait(ranks.stream(0), ranks.view(0), 0, 1, 2), UsageError);
  EXPECT_THROW(comm::cuda_wait(ranks.stream(0), ranks.view(0), 0, -1, 1), UsageError);
}

TEST(DelayKernels, ASpinEndsByTimeOrByTheHost) {
  FSDPP_NEED_GPU();
  HostWord stop;
  cudaEvent_t begin;
  cudaEvent_t end;
  FSDPP_CUDA(cudaEventCreate(&begin));
  FSDPP_CUDA(cudaEventCreate(&end));
  device::load_spin_kernel();
  FSDPP_CUDA(cudaEventRecord(begin, nullptr));
  device::cuda_spin(nullptr, 3'000, stop.data());
  FSDPP_CUDA(cudaEventRecord(end, nullptr));
  FSDPP_CUDA(cudaEventSynchronize(end));
  float milliseconds = 0;
  FSDPP_CUDA(cudaEventElapsedTime(&milliseconds, begin, end));
  EXPECT_GE(milliseconds, 2.9F);
  device::cuda_spin(nullptr, 3'600'000'000, stop.data());  // an hour
  EXPECT_TRUE(is_busy(nullptr));
  stop.set();
  FSDPP_CUDA(cudaDeviceSynchronize());
  FSDPP_CUDA(cudaEventDestroy(begin));
  FSDPP_CUDA(cudaEventDestroy(end));
}

TEST(DelayKernels, PoisonIsNanInEveryType) {
  FSDPP_NEED_GPU();
  const Memory<float> memory(std::vector<float>(100, 1.0F));
  device::cuda_poison(nullptr, memory.data(), 99 * sizeof(float));
  device::cuda_poison(nullptr, memory.data(), 0);
  const std::vector<float> values = memory.download();
  for (int i = 0; i < 99; ++i) EXPECT_TRUE(std::isnan(values[i])) << i;
  EXPECT_EQ(values[99], 1.0F);
  EXPECT_TRUE(std::isnan(from_bf16(0xFFFF)));
}

}  // namespace
}  // namespace fsdpp::gpu_test
