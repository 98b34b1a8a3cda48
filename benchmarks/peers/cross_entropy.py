"""The loss of the GPU benchmark's models: torch's cross entropy in fp32, a piece of the tokens at a time.

The same in both languages (fsdpp/nn/cross_entropy.h), so that neither side holds copies in fp32 of all scores.
"""

import torch
from torch.nn import functional as F

SCORES_AT_A_TIME = 1 << 25


def pieces(scores, *others):
    """The rows of all of them, so many at a time."""
    rows = max(1, SCORES_AT_A_TIME // scores.shape[1])
    return zip(*(tensor.split(rows) for tensor in (scores, *others)), strict=True)


class CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(context, scores, targets):
        """scores [tokens, classes], targets [tokens], each a class; the mean over tokens, a scalar in fp32."""
        total = torch.zeros((), dtype=torch.float, device=scores.device)
        for piece, wanted in pieces(scores, targets):
            total += F.nll_loss(F.log_softmax(piece.float(), dim=1), wanted, reduction="sum")
        context.save_for_backward(scores, targets)
        return total / len(targets)

    @staticmethod
    def backward(context, gradient):
        scores, targets = context.saved_tensors
        out = torch.empty_like(scores)
        each = gradient / len(targets)
        minus_one = torch.full((1, 1), -1.0, device=scores.device)
        for piece, wanted, place in pieces(scores, targets, out):
            likely = F.softmax(piece.float(), dim=1)
            likely.scatter_add_(1, wanted[:, None], minus_one.expand(len(wanted), 1))
            torch.mul(likely, each, out=place)
        return out, None


cross_entropy = CrossEntropy.apply
