#pragma once

struct CUstream_st;

namespace fsdpp::device {

/// A cudaStream_t, without CUDA's headers. Null is the legacy default stream.
using Stream = CUstream_st*;

}  // namespace fsdpp::device
