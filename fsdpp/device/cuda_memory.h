#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "fsdpp/device/memory.h"

namespace fsdpp::device {

/// Zero-filled memory (`bytes` > 0) of the current GPU, or of the host, pinned. Ready when they return: the
/// lanes do not wait for the default stream. `ledger` may be null. Throw NoRoomError, naming purpose and
/// bytes (of a GPU also what is free), when there is no room.
[[nodiscard]] Memory take_cuda_memory(std::size_t bytes, std::string purpose, std::shared_ptr<Ledger> ledger);
[[nodiscard]] Memory take_pinned_memory(std::size_t bytes, std::string purpose,
                                        std::shared_ptr<Ledger> ledger);

}  // namespace fsdpp::device
