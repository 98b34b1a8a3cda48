// Headers of libtorch that most of our heavy files share.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/module.h>
