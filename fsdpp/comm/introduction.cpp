#include "fsdpp/comm/introduction.h"

#include <sstream>

#include "fsdpp/base/error.h"

namespace fsdpp::comm {

std::string to_text(const Introduction& introduction) {
  const HostId& host = introduction.host;
  return text(introduction.rank, " ", introduction.ranks, " ", introduction.process.pid, " ",
              introduction.process.started, " ", introduction.descriptor, "\n", host.name, "\n", host.boot,
              "\n", host.pid_namespace, "\n");
}

Introduction introduction_from(const std::string& from) {
  Introduction read;
  std::istringstream in(from);
  in >> read.rank >> read.ranks >> read.process.pid >> read.process.started >> read.descriptor;
  in.ignore(1);  // the end of the line
  std::getline(in, read.host.name);
  std::getline(in, read.host.boot);
  if (!std::getline(in, read.host.pid_namespace)) {
    throw EnvironmentError("a rank introduced itself with \"" + from +
                           "\", which is not understood: all ranks must run the same version of the program");
  }
  return read;
}

void require_one_host(std::span<const Introduction> all) {
  const Introduction& first = all.front();
  for (const Introduction& other : all) {
    require(other.ranks == first.ranks, "rank 0 was started as one of ", first.ranks, " ranks, rank ",
            other.rank, " as one of ", other.ranks, ": start all ranks with the same number");
    if (other.host == first.host) continue;
    const std::string who = text("rank 0 runs on host \"", first.host.name, "\" and rank ", other.rank,
                                 " on host \"", other.host.name, "\"");
    require(
        other.host.boot != first.host.boot || other.host.pid_namespace == first.host.pid_namespace, who,
        " in different containers (process namespaces ", first.host.pid_namespace, " and ",
        other.host.pid_namespace,
        "), which cannot open each other's memory: start all ranks in one container, or share its namespace");
    throw UsageError(text(who, " (boot ids ", first.host.boot, " and ", other.host.boot,
                          "): shared memory cannot span hosts; start all ranks on one host"));
  }
}

}  // namespace fsdpp::comm
