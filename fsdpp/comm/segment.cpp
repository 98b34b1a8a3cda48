#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "fsdpp/base/bytes.h"
#include "fsdpp/base/error.h"
#include "fsdpp/base/interrupt.h"
#include "fsdpp/comm/host_memory.h"
#include "fsdpp/comm/shared_memory.h"

namespace fsdpp::comm {
namespace {

[[noreturn]] void refuse(const std::string& what, std::size_t bytes, const std::string& purpose, int error,
                         const std::string& remedy) {
  throw EnvironmentError(text("cannot ", what, " ", bytes, " bytes (",
                              human_bytes(static_cast<int64_t>(bytes)), ") of shared memory for ", purpose,
                              ": ", std::strerror(error), "; ", remedy));
}

constexpr const char* kNeedsRoom =
    "use a smaller model or batch, fewer ranks on this host, or raise the limit on memory";

// posix_fallocate gives back its error instead of setting errno; a signal ends it early.
int reserve(int descriptor, std::size_t bytes) {
  int error = 0;
  do {
    error = posix_fallocate(descriptor, 0, static_cast<off_t>(bytes));
  } while (error == EINTR && !interrupted());
  return error;
}

}  // namespace

Segment Segment::create(std::size_t bytes, const std::string& purpose) {
  const std::size_t size = whole_pages(bytes);
  Segment made(memfd_create("fsdpp", MFD_CLOEXEC | MFD_ALLOW_SEALING), size);
  if (made.descriptor_ < 0)
    refuse("make a file of", size, purpose, errno, "raise the limit on open files (ulimit -n)");
  if (ftruncate(made.descriptor_, static_cast<off_t>(size)) != 0)
    refuse("get", size, purpose, errno, kNeedsRoom);
  if (const int error = reserve(made.descriptor_, size); error != 0) {
    if (error == EINTR) throw Interrupted("asked to stop while reserving memory for " + purpose);
    refuse("get", size, purpose, error, kNeedsRoom);
  }
  // Nobody can make the file smaller from here on: that would be a bus error in every process that maps it.
  fcntl(made.descriptor_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW);
  made.map(purpose);
  return made;
}

Segment Segment::open(const ProcessId& owner, int descriptor, std::size_t bytes, const std::string& purpose) {
  const std::size_t size = whole_pages(bytes);
  const std::string path = text("/proc/", owner.pid, "/fd/", descriptor);
  Segment opened(::open(path.c_str(), O_RDWR | O_CLOEXEC), size);
  const int error = errno;
  // Looked at after opening: the file is then that of the process meant, not of a later one with its number.
  const std::optional<ProcessState> state = process_state(owner.pid);
  if (!state || state->id != owner) {
    throw EnvironmentError(
        text("process ", owner.pid, " is gone, whose memory for ", purpose, " was to be opened"));
  }
  if (opened.descriptor_ < 0) {
    refuse("open " + path + " with", size, purpose, error,
           "all ranks must run as the same user and may not be protected from each other (prctl "
           "PR_SET_DUMPABLE)");
  }
  struct stat info{};
  if (fstat(opened.descriptor_, &info) != 0 || static_cast<std::size_t>(info.st_size) != size) {
    throw EnvironmentError(text(path, " has ", info.st_size, " bytes, expected ", size, " for ", purpose));
  }
  opened.map(purpose);
  opened.close_descriptor();
  return opened;
}

// Populated at once: the first use of a page is then no slower than any later one.
void Segment::map(const std::string& purpose) {
  void* const start =
      mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, descriptor_, 0);
  if (start == MAP_FAILED) refuse("map", bytes_, purpose, errno, kNeedsRoom);
  data_ = static_cast<std::byte*>(start);
}

Segment::Segment(Segment&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(other.bytes_) {}

Segment& Segment::operator=(Segment&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Segment::~Segment() {
  if (data_ != nullptr) munmap(data_, bytes_);
  close_descriptor();
}

void Segment::close_descriptor() noexcept {
  if (descriptor_ >= 0) close(descriptor_);
  descriptor_ = -1;
}

}  // namespace fsdpp::comm
