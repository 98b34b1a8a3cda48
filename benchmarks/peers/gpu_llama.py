"""The Llama of fsdpp/nn/llama.cpp in PyTorch, as peers of the GPU benchmark use it: the same maths, bf16 compute.

The same attention call, torch's RMS norm, rotation by halves with bf16 tables, SwiGLU, cross entropy of the logits as
fp32, an untied head, no biases.
"""

import math
import zlib

import torch
import torch.nn.functional as F
from rotation import rotate, rotate_plainly
from torch import nn

DEVIATION = 0.02
ROPE_THETA = 10000.0
NORM_EPS = 1e-5


class Block(nn.Module):
    def __init__(self, arguments):
        super().__init__()
        dim, ffn = arguments.dim, arguments.ffn
        self.heads, self.kv_heads, self.head_size = arguments.heads, arguments.kv_heads, dim // arguments.heads
        self.rotate = rotate_plainly if arguments.compile else rotate
        self.attention_norm = nn.RMSNorm(dim, eps=NORM_EPS)
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, self.kv_heads * self.head_size, bias=False)
        self.value = nn.Linear(dim, self.kv_heads * self.head_size, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)
        self.ffn_norm = nn.RMSNorm(dim, eps=NORM_EPS)
        self.gate = nn.Linear(dim, ffn, bias=False)
        self.up = nn.Linear(dim, ffn, bias=False)
        self.down = nn.Linear(ffn, dim, bias=False)

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
        normed = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    def __init__(self, arguments):
        super().__init__()
        self.embedding = nn.Embedding(arguments.vocabulary, arguments.dim)
        self.blocks = nn.ModuleList(Block(arguments) for _ in range(arguments.layers))
        self.norm = nn.RMSNorm(arguments.dim, eps=NORM_EPS)
        self.head = nn.Linear(arguments.dim, arguments.vocabulary, bias=False)
        table = torch.empty(arguments.sequence, arguments.dim // arguments.heads, dtype=torch.bfloat16)
        self.register_buffer("cos", table, persistent=False)
        self.register_buffer("sin", table.clone(), persistent=False)

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def fill(model):
    """Values of all parameters and tables, in place: those of an unsharded model whatever the ranks are.

    Every parameter has its own generator, so at most one is whole at a time and no rank needs another.
    """
    from torch.distributed.tensor import DTensor, distribute_tensor

    residual = DEVIATION / math.sqrt(2 * len(model.blocks))  # what adds to the residual stream starts smaller
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            full = torch.ones(parameter.shape, device=parameter.device)
            if parameter.dim() == 2:
                generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
                std = residual if name.endswith(("output.weight", "down.weight")) else DEVIATION
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
