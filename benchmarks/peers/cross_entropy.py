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
        norms = torch.empty(len(scores), 1, dtype=torch.float, device=scores.device)
        total = torch.zeros((), dtype=torch.float, device=scores.device)
        for piece, wanted, norm in pieces(scores, targets, norms):
            piece = piece.float()
            likely = F.log_softmax(piece, dim=1)
            total += F.nll_loss(likely, wanted, reduction="sum")
            largest, where = piece.max(dim=1, keepdim=True)
            norm.copy_(largest - likely.gather(1, where))
        context.save_for_backward(scores, targets, norms)
        return total / len(targets)

    @staticmethod
    def backward(context, gradient):
        scores, targets, norms = context.saved_tensors
        out = torch.empty_like(scores)
        each = gradient / len(targets)
        minus_one = torch.full((1, 1), -1.0, device=scores.device)
        for piece, wanted, norm, place in pieces(scores, targets, norms, out):
            likely = torch.sub(piece, norm).exp_()
            likely.scatter_add_(1, wanted[:, None], minus_one.expand(len(wanted), 1))
            torch.mul(likely, each, out=place)
        return out, None


cross_entropy = CrossEntropy.apply
