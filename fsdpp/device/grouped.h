#pragma once

#include <cstdint>

#include "fsdpp/device/element.h"

namespace fsdpp::device {

/// The rows of two matrices, in groups: rows offsets[g-1] (0 for g = 0) up to offsets[g] are group g's.
struct GroupedProduct {
  const void* left = nullptr;        // [rows, m], row-major, of `element`
  const void* right = nullptr;       // [rows, n], row-major, of `element`
  Element element = Element::bf16;   // of both matrices
  const int32_t* offsets = nullptr;  // the end of each group, non-decreasing; where the matrices lie
  int first = 0;                     // the first group that is computed
  int groups = 0;                    // how many are: 1 or more
  int64_t rows = 0;                  // of the matrices; those behind the last group are nobody's
  int64_t m = 0;
  int64_t n = 0;
  float kept = 1;
  float scale = 1;
};

}  // namespace fsdpp::device
