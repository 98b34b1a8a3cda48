#pragma once

#include <cstdint>

#include "fsdpp/device/element.h"
#include "fsdpp/device/runs.h"

namespace fsdpp::device {

/// Neighbouring weights with fp32 main weights, their gradient and moments; `model`, if not null, gets the
/// new weights rounded to nearest even. Device pointers, aligned to their elements; those of a run must not
/// overlap others.
struct AdamwRun {
  float* main;
  const float* gradient;
  float* first;   // mean of gradients
  float* second;  // mean of squared gradients
  void* model;
  int64_t count;
  int64_t first_tile;  // by place_tiles()
};

/// What one update needs to know. Pointers are to device memory, read when the kernel runs: what changes from
/// step to step need not be baked into a captured graph.
struct AdamwStep {
  double learning_rate = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;
  int64_t step = 1;                          // number of this update, from 1
  const int64_t* step_counter = nullptr;     // if not null, read instead of `step`
  const float* learning_rate_now = nullptr;  // if not null, read instead of `learning_rate`
  const float* gradient_factor = nullptr;    // if not null, gradients are multiplied by it (clipping)
};

/// Neighbouring fp32 numbers in device memory, aligned to 4 bytes; at full bandwidth wherever they begin.
struct NormRun {
  const float* data;
  int64_t count;
  int64_t first_tile;  // by place_tiles()
};

/// Doubles of device memory that norm_part() wants as workspace. It needs no initial value.
inline constexpr int kNormWorkspace = 528;

/// What an optimizer of ours needs of a device that has kernels for it. Called inside an operation's work.
/// Tables of runs lie in device memory.
class OptimizerKernels {
 public:
  virtual ~OptimizerKernels() = default;
  /// Adds 1 to a counter of steps.
  virtual void advance(int64_t* step_counter) const = 0;
  /// One AdamW update of all runs, and the cast to the model's weights.
  virtual void adamw(const AdamwRun* runs, int run_count, int64_t tiles, Element model,
                     const AdamwStep& step) const = 0;
  /// This rank's part of a norm over all runs.
  virtual void norm_part(const NormRun* runs, int run_count, int64_t tiles, double norm_type,
                         double* workspace, double* part) const = 0;
  /// Norm and clipping factor from every rank's part.
  virtual void clip_factor(const double* parts, int ranks, double norm_type, double max_norm, double* norm,
                           float* factor) const = 0;
};

}  // namespace fsdpp::device
