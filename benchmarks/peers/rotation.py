"""Rotary positions as fsdpp/nn/rotary.cpp applies them: three kernels forward and three backward."""

import torch


class Rotation(torch.autograd.Function):
    """The halves (a, b) of a head become (a cos - b sin, b cos + a sin); turned back by direction -1."""

    @staticmethod
    def forward(x, cos, sin, direction):
        half = x.shape[-1] // 2
        angle = sin[..., :half]
        turned = x * cos
        turned[..., :half].addcmul_(x[..., half:], angle, value=-direction)
        turned[..., half:].addcmul_(x[..., :half], angle, value=direction)
        return turned

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, cos, sin, ctx.direction = inputs
        ctx.save_for_backward(cos, sin)

    @staticmethod
    def backward(ctx, gradient):
        return Rotation.apply(gradient, *ctx.saved_tensors, -ctx.direction), None, None, None


def rotate(x, cos, sin):
    """x [b, heads, t, head_size], tables [t, head_size] whose halves are equal."""
    return Rotation.apply(x, cos, sin, 1.0)


def rotate_plainly(x, cos, sin):
    """The same for a compiler, which makes one kernel of it."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
