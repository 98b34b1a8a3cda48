#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <vector>

#include "fsdpp/base/error.h"
#include "fsdpp/device/host.h"
#include "fsdpp/device/ledger.h"
#include "fsdpp/device/memory.h"
#include "fsdpp/trace/recorder.h"

namespace fsdpp {
namespace {

using device::LaneKind;
using device::OperationKind;

TEST(HostDevice, RunsEveryVerbInOrderAndAtOnce) {
  device::HostDevice device;
  std::array<char, 4> source = {'a', 'b', 'c', 'd'};
  std::array<char, 4> target = {};
  device.fill(LaneKind::compute, "fill", target.data(), 'x', 4);
  EXPECT_EQ(target[3], 'x');
  device.copy(LaneKind::gather, "copy", target.data(), source.data(), 2);
  EXPECT_EQ(std::string(target.data(), 4), "abxx");
  bool ran = false;
  device.run(LaneKind::reduce, "run", {}, [&] { ran = target[0] == 'a'; });
  EXPECT_TRUE(ran);
}

TEST(HostDevice, AnnouncesLaneRangesAndEventsBeforeTheWorkRuns) {
  device::HostDevice device;
  trace::Recorder recorder;
  device.observe(&recorder);
  std::array<int, 2> data = {};
  const device::Event event = device.record(LaneKind::compute);
  device.wait(LaneKind::reduce, event);
  std::size_t announced = 0;
  device.run(LaneKind::reduce, "sum", {{{data.data(), 4}}, {{data.data() + 1, 4}}},
             [&] { announced = recorder.operations().size(); });
  ASSERT_EQ(recorder.operations().size(), 3U);
  EXPECT_EQ(announced, 3U);
  EXPECT_EQ(recorder.operations()[0].kind, OperationKind::record);
  EXPECT_EQ(recorder.operations()[0].event.position, 1U);
  EXPECT_EQ(recorder.operations()[1].event.lane, LaneKind::compute);
  EXPECT_EQ(recorder.operations()[1].event.position, event.position);
  EXPECT_EQ(recorder.operations()[2].reads[0].begin, data.data());
  EXPECT_EQ(recorder.operations()[2].writes[0].begin, data.data() + 1);
  EXPECT_EQ(recorder.operations()[2].position, 2U) << "positions count per lane";
  EXPECT_EQ(recorder.count(OperationKind::run, "su"), 1U);
  device.unobserve(&recorder);
  device.record(LaneKind::compute);
  EXPECT_EQ(recorder.operations().size(), 3U);
}

TEST(HostDevice, WaitForADefaultEventIsNoOperation) {
  device::HostDevice device;
  trace::Recorder recorder;
  device.observe(&recorder);
  device.wait(LaneKind::compute, device::Event{});
  EXPECT_TRUE(recorder.operations().empty());
}

// For checkers: these say something and, but for the collective, do nothing.
TEST(HostDevice, AnnouncesTheHostsPartAndTheMarks) {
  device::HostDevice device;
  trace::Recorder recorder;
  device.observe(&recorder);
  std::array<int, 2> data = {};
  const ByteRange range{data.data(), sizeof data};
  device.wait(LaneKind::host, device.record(LaneKind::gather));
  device.free(LaneKind::host, "weights", range);
  device.free(LaneKind::host, "nothing", {});
  device.rejoin(LaneKind::compute, "end");
  device.move("unit a", device::State::released, device::State::gathering);
  bool called = false;
  device.collective(LaneKind::reduce, "sum", {"world", 2, "all_reduce", 8, "float"}, {{range}, {range}},
                    [&] { called = true; });
  EXPECT_TRUE(called);
  ASSERT_EQ(recorder.operations().size(), 6U);
  EXPECT_EQ(trace::describe(recorder.operations()[1]), "host #1 wait (gather #1)");
  EXPECT_EQ(trace::describe(recorder.operations()[2]), "host #2 free weights");
  EXPECT_EQ(recorder.operations()[2].writes[0].size, sizeof data);
  EXPECT_EQ(trace::describe(recorder.operations()[3]), "compute #1 rejoin end");
  EXPECT_EQ(recorder.operations()[4].to, device::State::gathering);
  EXPECT_EQ(recorder.operations()[5].collective->kind, "all_reduce");
  EXPECT_EQ(recorder.operations()[5].reads[0].begin, data.data());
}

TEST(Recorder, DescribesAWaitForAPeer) {
  device::HostDevice device;
  trace::Recorder recorder;
  device.observe(&recorder);
  device.wait_signal(LaneKind::reduce, "ready layers.0", 2, 7, 3, [] {});
  EXPECT_EQ(trace::describe(recorder.operations()[0]),
            "reduce #1 wait_signal ready layers.0 (rank 2, channel 7, sequence 3)");
}

TEST(Ledger, CountsByPurposeAndKeepsThePeak) {
  device::Ledger ledger;
  ledger.add("slots", 100);
  ledger.add("weights", 50);
  ledger.remove("slots", 100);
  EXPECT_EQ(ledger.current(), 50);
  EXPECT_EQ(ledger.peak(), 150);
  EXPECT_EQ(ledger.by_purpose().count("slots"), 0U);
  ledger.remove("unknown", 0);
  EXPECT_EQ(ledger.current(), 50);
  EXPECT_DEATH(ledger.remove("weights", 51), "51 bytes taken back for \"weights\", of which only 50");
  EXPECT_DEATH(ledger.remove("unknown", 1), "1 bytes taken back for \"unknown\"");
}

TEST(HostMemory, EntersTheLedgerWhileItLives) {
  const auto ledger = std::make_shared<device::Ledger>();
  {
    device::Memory memory = device::host_memory(5000, "test", ledger);
    EXPECT_EQ(memory.data()[4999], std::byte{0});
    device::Memory moved = std::move(memory);
    EXPECT_EQ(moved.bytes(), 5000U);
    EXPECT_EQ(ledger->current(), 5000);
  }
  EXPECT_EQ(ledger->current(), 0);
  EXPECT_EQ(ledger->peak(), 5000);
}

TEST(HostMemory, LackOfRoomIsAnErrorThatNamesPurposeAndSize) {
  try {
    const device::Memory memory = device::host_memory(std::size_t{1} << 60, "weights", nullptr);
    FAIL() << "an exbibyte was given";
  } catch (const EnvironmentError& error) {
    EXPECT_NE(std::string(error.what()).find("weights"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("1024.00 PiB"), std::string::npos) << error.what();
  }
}

TEST(ForbiddenRangeDeathTest, TouchingItNamesItsOwner) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  device::ForbiddenRange range(1 << 20, "weights of unit layers.3 were released");
  EXPECT_DEATH(
      {
        volatile char* byte = reinterpret_cast<volatile char*>(range.data()) + 4321;
        *byte = 1;
      },
      "weights of unit layers.3 were released");
}

}  // namespace
}  // namespace fsdpp
