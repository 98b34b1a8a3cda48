#pragma once

#include <cstddef>
#include <cstdint>

namespace fsdpp::device {

/// How a number is stored.
enum class Element : uint8_t { fp32, bf16, fp16 };

/// Bytes of one element.
[[nodiscard]] constexpr std::size_t element_size(Element element) noexcept {
  return element == Element::fp32 ? 4 : 2;
}

}  // namespace fsdpp::device
