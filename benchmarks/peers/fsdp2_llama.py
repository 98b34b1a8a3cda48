#!/usr/bin/env python3
"""The small Llama of `fsdpp train` in PyTorch, sharded by FSDP2 over gloo: what bench_cpu.py measures us against.

    .venv/bin/python benchmarks/peers/fsdp2_llama.py --ranks 4 --dim 256 --layers 4

Starts one process per rank. Every rank prints one line of JSON: tokens per second over all ranks (median of the steps
after warm-up) and its resident memory. fp32 on the CPU, one thread per rank unless OMP_NUM_THREADS says otherwise.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time

VOCABULARY = 257  # bytes and the document boundary


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in [("dim", 256), ("layers", 4), ("heads", 8), ("kv_heads", 4), ("ffn", 704)]:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16, help="sequences per step over all ranks")
    parser.add_argument("--steps", type=int, default=20, help="steps that are measured")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tied", action="store_true", help="the head is the embedding's weight")
    parser.add_argument("--text", help="file whose bytes are trained on; without it random bytes")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--clip", type=float, default=1.0)
    arguments = parser.parse_args()
    if arguments.batch % arguments.ranks:
        parser.error(f"--batch {arguments.batch} is not divisible by --ranks {arguments.ranks}")
    if arguments.dim % arguments.heads or arguments.heads % arguments.kv_heads:
        parser.error("--heads must divide --dim, and --kv_heads must divide --heads")
    return arguments


def start_ranks(ranks):
    """Runs this script once per rank with torchrun's variables; returns the first non-zero exit code, or 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"OMP_NUM_THREADS": "1", **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, *sys.argv], env=common | {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
        )
        for rank in range(ranks)
    ]
    try:
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                break
            time.sleep(0.05)
        return next((process.returncode for process in processes if process.returncode), 0)
    finally:
        for process in processes:
            process.kill()


def resident_bytes():
    """(VmRSS, PSS) of this process: PSS counts a page that k processes map as 1/k."""

    def field(path, name):
        with open(path) as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name + ":"))

    return field("/proc/self/status", "VmRSS"), field("/proc/self/smaps_rollup", "Pss")


def build_llama(arguments):
    import torch
    import torch.nn.functional as F
    from rotation import rotate
    from torch import nn

    head_dim = arguments.dim // arguments.heads

    def rotation():
        frequency = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angle = torch.outer(torch.arange(arguments.sequence, dtype=torch.float32), frequency)
        return torch.cat([angle, angle], dim=-1).cos(), torch.cat([angle, angle], dim=-1).sin()

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention_norm = nn.RMSNorm(arguments.dim, eps=1e-5)
            self.q = nn.Linear(arguments.dim, arguments.heads * head_dim, bias=False)
            self.k = nn.Linear(arguments.dim, arguments.kv_heads * head_dim, bias=False)
            self.v = nn.Linear(arguments.dim, arguments.kv_heads * head_dim, bias=False)
            self.o = nn.Linear(arguments.heads * head_dim, arguments.dim, bias=False)
            self.ffn_norm = nn.RMSNorm(arguments.dim, eps=1e-5)
            self.gate = nn.Linear(arguments.dim, arguments.ffn, bias=False)
            self.up = nn.Linear(arguments.dim, arguments.ffn, bias=False)
            self.down = nn.Linear(arguments.ffn, arguments.dim, bias=False)

        def attention(self, x, cos, sin):
            batch, sequence, _ = x.shape
            q = self.q(x).view(batch, sequence, arguments.heads, head_dim).transpose(1, 2)
            k = self.k(x).view(batch, sequence, arguments.kv_heads, head_dim).transpose(1, 2)
            v = self.v(x).view(batch, sequence, arguments.kv_heads, head_dim).transpose(1, 2)
            mixed = F.scaled_dot_product_attention(
                rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True,
                enable_gqa=arguments.kv_heads != arguments.heads,
            )
            return self.o(mixed.transpose(1, 2).reshape(batch, sequence, -1))

        def forward(self, x, cos, sin):
            x = x + self.attention(self.attention_norm(x), cos, sin)
            normed = self.ffn_norm(x)
            return x + self.down(F.silu(self.gate(normed)) * self.up(normed))

    class Llama(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, arguments.dim)
            self.blocks = nn.ModuleList(Block() for _ in range(arguments.layers))
            self.norm = nn.RMSNorm(arguments.dim, eps=1e-5)
            self.head = nn.Linear(arguments.dim, VOCABULARY, bias=False)
            for name, parameter in self.named_parameters():
                if parameter.dim() == 2:  # what adds to the residual stream starts smaller, as in our own Llama
                    residual = name.endswith(("o.weight", "down.weight"))
                    nn.init.normal_(parameter, std=0.02 / (2 * arguments.layers) ** 0.5 if residual else 0.02)
            if arguments.tied:
                self.head.weight = self.embedding.weight
            cos, sin = rotation()
            self.register_buffer("cos", cos, persistent=False)
            self.register_buffer("sin", sin, persistent=False)

        def forward(self, tokens, targets):
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x, self.cos, self.sin)
            logits = self.head(self.norm(x))
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return Llama()


def batches(arguments, rank):
    """Endless (tokens, targets) of this rank's part of the batch."""
    import torch

    generator = torch.Generator().manual_seed(1 + rank)
    if arguments.text:
        text = torch.from_file(arguments.text, size=os.path.getsize(arguments.text), dtype=torch.uint8)
    else:
        text = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, generator=generator)
    while True:
        starts = torch.randint(0, len(text) - arguments.sequence - 1, (arguments.batch // arguments.ranks,),
                               generator=generator)
        window = torch.stack([text[i : i + arguments.sequence + 1] for i in starts.tolist()]).long()
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()


def train(arguments, rank):
    """One rank: trains and returns the line that is printed."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (arguments.ranks,))
    model = build_llama(arguments)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=arguments.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    data = batches(arguments, rank)
    seconds = []
    for _ in range(arguments.warmup + arguments.steps):
        begin = time.perf_counter()
        tokens, targets = next(data)
        loss = model(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), arguments.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss = torch.tensor(loss.item())
        seconds.append(time.perf_counter() - begin)
        dist.all_reduce(loss)  # the mean that a trainer shows; like the trainer's own, outside the step's time
    rss, pss = resident_bytes()
    median = statistics.median(seconds[arguments.warmup :])
    result = {
        "rank": rank,
        "tokens_per_s": arguments.batch * arguments.sequence / median,
        "step_s": median,
        "loss": loss.item() / arguments.ranks,
        "parameters": parameters,
        "rss_bytes": rss,
        "pss_bytes": pss,
    }
    dist.barrier()
    dist.destroy_process_group()
    return result


def main():
    arguments = parse_arguments()
    if "RANK" not in os.environ:
        sys.exit(start_ranks(arguments.ranks))
    line = json.dumps(train(arguments, int(os.environ["RANK"])))
    os.write(1, (line + "\n").encode())  # in one piece: the ranks share the stream


if __name__ == "__main__":
    main()
