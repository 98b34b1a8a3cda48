"""The Llama of fsdpp/nn/llama.cpp in PyTorch, as peers of the GPU benchmark use it: the same maths, bf16 compute.

The same attention call, torch's RMS norm, rotation by halves with bf16 tables, SwiGLU, cross entropy of the logits as
fp32, an untied head, no biases.
"""

import math
import zlib

import torch
import torch.nn.functional as F
from cross_entropy import cross_entropy
from rotation import rotate, rotate_plainly
from torch import nn
from torch.utils.checkpoint import checkpoint

DEVIATION = 0.02
ROPE_THETA = 10000.0
NORM_EPS = 1e-5


class Linear(nn.Module):
    """Without a bias; with an adapter of `rank` on a frozen weight when that is above 0."""

    def __init__(self, inputs, outputs, rank=0):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs), requires_grad=rank == 0)
        self.rank = rank
        if rank:
            self.adapter_in = nn.Parameter(torch.empty(rank, inputs))
            self.adapter_out = nn.Parameter(torch.empty(outputs, rank))

    def forward(self, x):
        y = F.linear(x, self.weight)
        return y + F.linear(F.linear(x, self.adapter_in), self.adapter_out) if self.rank else y


class FeedForward(nn.Module):
    def __init__(self, arguments):
        super().__init__()
        self.gate = Linear(arguments.dim, arguments.ffn, arguments.adapter_rank)
        self.up = Linear(arguments.dim, arguments.ffn, arguments.adapter_rank)
        self.down = Linear(arguments.ffn, arguments.dim, arguments.adapter_rank)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """fsdpp/nn/expert_feed_forward.cpp with torch's grouped GEMM, whose weight gradient is bf16."""

    def __init__(self, arguments):
        super().__init__()
        count, dim, ffn = arguments.experts, arguments.dim, arguments.ffn
        self.active = arguments.active_experts
        self.router = nn.Linear(dim, count, bias=False)
        self.gate = nn.Parameter(torch.empty(count, ffn, dim))
        self.up = nn.Parameter(torch.empty(count, ffn, dim))
        self.down = nn.Parameter(torch.empty(count, dim, ffn))

    def forward(self, x):
        shape, x = x.shape, x.flatten(0, -2)
        scores, chosen = self.router(x).float().topk(self.active)
        weights = scores.softmax(-1)
        expert, order = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(expert, torch.arange(len(self.gate), device=x.device), out_int32=True, right=True)
        rows = x.unsqueeze(1).expand(-1, self.active, -1).reshape(-1, x.shape[1]).index_select(0, order)

        def grouped(y, weight):
            return torch._grouped_mm(y, weight.transpose(1, 2), offs=ends)

        outputs = grouped(F.silu(grouped(rows, self.gate)) * grouped(rows, self.up), self.down)
        back = torch.empty_like(order).index_put((order,), torch.arange(len(order), device=x.device))
        by_token = outputs.index_select(0, back).view(-1, self.active, x.shape[1])
        return (by_token * weights.unsqueeze(2).to(by_token.dtype)).sum(1).view(shape)


class Block(nn.Module):
    def __init__(self, arguments):
        super().__init__()
        dim, rank = arguments.dim, arguments.adapter_rank
        self.heads, self.kv_heads, self.head_size = arguments.heads, arguments.kv_heads, dim // arguments.heads
        self.rotate = rotate_plainly if arguments.compile else rotate
        self.attention_norm = nn.RMSNorm(dim, eps=NORM_EPS)
        self.query = Linear(dim, dim, rank)
        self.key = Linear(dim, self.kv_heads * self.head_size, rank)
        self.value = Linear(dim, self.kv_heads * self.head_size, rank)
        self.output = Linear(dim, dim, rank)
        self.ffn_norm = nn.RMSNorm(dim, eps=NORM_EPS)
        self.feed_forward = Experts(arguments) if arguments.experts else FeedForward(arguments)

    def attention(self, x, cos, sin):
        batch, length, dim = x.shape

        def split(y, heads):
            return y.view(batch, length, heads, self.head_size).transpose(1, 2)

        mixed = F.scaled_dot_product_attention(
            self.rotate(split(self.query(x), self.heads), cos, sin),
            self.rotate(split(self.key(x), self.kv_heads), cos, sin),
            split(self.value(x), self.kv_heads),
            is_causal=True, enable_gqa=self.kv_heads != self.heads,
        )
        return self.output(mixed.transpose(1, 2).reshape(batch, length, dim))

    def forward(self, x, cos, sin):
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, arguments):
        super().__init__()
        self.recompute = arguments.recompute
        self.embedding = nn.Embedding(arguments.vocabulary, arguments.dim)
        self.blocks = nn.ModuleList(Block(arguments) for _ in range(arguments.layers))
        self.norm = nn.RMSNorm(arguments.dim, eps=NORM_EPS)
        self.head = nn.Linear(arguments.dim, arguments.vocabulary, bias=False)
        table = torch.empty(arguments.sequence, arguments.dim // arguments.heads, dtype=torch.bfloat16)
        self.register_buffer("cos", table, persistent=False)
        self.register_buffer("sin", table.clone(), persistent=False)
        if arguments.adapter_rank:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_("adapter_" in name)

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(block, x, self.cos, self.sin, use_reentrant=False)
            else:
                x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return cross_entropy(logits.flatten(0, 1), targets.flatten())


def fill(model):
    """Values of all parameters and tables, in place: those of an unsharded model whatever the ranks are.

    Every parameter has its own generator, so at most one is whole at a time and no rank needs another.
    """
    from torch.distributed.tensor import DTensor, distribute_tensor

    residual = DEVIATION / math.sqrt(2 * len(model.blocks))  # what adds to the residual stream starts smaller
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            full = torch.ones(parameter.shape, device=parameter.device)
            if parameter.dim() >= 2:
                generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
                std = residual if name.endswith(("output.weight", "down.weight", "down")) else DEVIATION
                full.normal_(std=std, generator=generator)
            if isinstance(parameter, DTensor):  # src_data_rank=None: each rank cuts its own part out, nothing is sent
                mine = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
                parameter.to_local().copy_(mine.to_local())
            else:
                parameter.copy_(full)
        length, head_size = model.cos.shape
        frequency = ROPE_THETA ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
        angles = torch.outer(torch.arange(length, dtype=torch.float64), frequency).repeat(1, 2)
        model.cos.copy_(angles.cos())
        model.sin.copy_(angles.sin())
