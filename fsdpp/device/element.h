#pragma once

#include <cstddef>
#include <cstdint>

namespace fsdpp::device {

/// How a number is stored.
enum class Element : uint8_t { fp32, bf16, fp16, fp64 };

/// Bytes of one element.
[[nodiscard]] constexpr std::size_t element_size(Element element) noexcept {
  if (element == Element::fp64) return 8;
  return element == Element::fp32 ? 4 : 2;
}

/// How sums of such elements are made and stored: fp64's in fp64, all others' in fp32.
[[nodiscard]] constexpr Element sum_element(Element element) noexcept {
  return element == Element::fp64 ? Element::fp64 : Element::fp32;
}

[[nodiscard]] constexpr const char* to_string(Element element) noexcept {
  switch (element) {
    case Element::fp32:
      return "fp32";
    case Element::bf16:
      return "bf16";
    case Element::fp16:
      return "fp16";
    case Element::fp64:
      return "fp64";
  }
  return "an element of no known type";
}

}  // namespace fsdpp::device
