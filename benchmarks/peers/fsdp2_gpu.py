#!/usr/bin/env python3
"""Our Llama in PyTorch, one process per GPU: unsharded (`--row plain`) or sharded by FSDP2 (`--row fsdp2`).

    make bench-gpu                                                       starts it, beside our own rows
    RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 \\
        .venv/bin/python benchmarks/peers/fsdp2_gpu.py --row plain --device cpu --layers 2 --dim 64 ...

The maths is that of fsdpp/nn/llama.cpp (gpu_llama.py): bf16 compute, cross entropy of the logits as fp32.

plain   bf16 weights, bf16 gradients; the processes share nothing but the start of the warm-up and of the timed steps.
fsdp2   fp32 weights, MixedPrecisionPolicy(bf16, reduce fp32 or bf16). Units: embedding, every block, final norm + head
        (not resharded between forward and backward, with --keep no unit is; the embedding is not gathered again for a
        backward that does not read it). Forward and backward prefetch `--prefetch` units ahead; 0 leaves FSDP2's own order.

A step drops the gradients, runs forward and backward, then the optimizer if asked. Every rank prints one line of JSON:
  ms             of each timed step between two CUDA events around it; the device is idle when a step begins
  host_ms        of each timed step from its begin until its last launch has returned
  allocated_gib, reserved_gib   peaks of torch's allocator over the timed steps
  taken_gib      all memory of the device in use, total - free as the driver says: this process has it alone
  parameters     of the unsharded model;   tokens   per step of this rank;   loss   of the last step
"""

import argparse
import contextlib
import gc
import json
import math
import os
import sys
import time

import torch
from gpu_llama import Llama, fill

GIB = 2**30
FIRST_STEPS = 2  # before the warm-up is timed: compilation, the first allocations, the communicator


def parse_arguments(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", choices=("plain", "fsdp2"), required=True)
    for name, default in [("layers", 16), ("dim", 4096), ("ffn", 14336), ("heads", 32), ("kv-heads", 8),
                          ("vocabulary", 128256), ("sequence", 4096)]:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--batch", type=int, default=1, help="sequences per GPU")
    parser.add_argument("--microbatches", type=int, default=1, help="per step, each of so many sequences")
    parser.add_argument("--replicas", type=int, default=1, help="of each shard, on a mesh of two dimensions")
    parser.add_argument("--no-sync", action="store_true", help="gradients are reduced at the last microbatch only")
    parser.add_argument("--reduce", choices=("fp32", "bf16"), default="fp32", help="dtype of FSDP2's gradient reduce")
    parser.add_argument("--prefetch", type=int, default=2, help="units gathered ahead; 0: FSDP2's default")
    parser.add_argument("--keep", action="store_true", help="reshard_after_forward=False for every unit")
    parser.add_argument("--compile", action="store_true", help="compile each block")
    parser.add_argument("--experts", type=int, default=0, help="per block; 0: one feed-forward part")
    parser.add_argument("--active-experts", type=int, default=2, help="of these, per token")
    parser.add_argument("--adapter-rank", type=int, default=0, help="above 0: only adapters of this rank are trained")
    parser.add_argument("--recompute", action="store_true", help="each block's activations (torch.utils.checkpoint)")
    parser.add_argument("--optimizer", action="store_true", help="add a step of the fused AdamW")
    parser.add_argument("--steps", type=int, default=10, help="steps that are timed")
    parser.add_argument("--warm-seconds", type=float, default=3.0, help="steps before them, at least this long")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the script, over gloo")
    parsed = parser.parse_args(arguments)
    if parsed.dim % parsed.heads or parsed.heads % parsed.kv_heads or parsed.dim // parsed.heads % 2:
        parser.error("--heads must divide --dim into even head sizes, and --kv-heads must divide --heads")
    if parsed.row == "plain" and parsed.optimizer:
        parser.error("--optimizer: the plain row keeps no fp32 weights; it is forward and backward only")
    return parsed


def shard(model, arguments):
    """FSDP2 over all ranks, in place."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    reduce_dtype = torch.float32 if arguments.reduce == "fp32" else torch.bfloat16
    ranks, replicas = int(os.environ["WORLD_SIZE"]), arguments.replicas
    hybrid = {"mesh_shape": (replicas, ranks // replicas), "mesh_dim_names": ("replicate", "shard")}
    flat = {"mesh_shape": (ranks,)}
    options = {
        "mesh": init_device_mesh(arguments.device, **(hybrid if replicas > 1 else flat)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype),
    }
    reshard = not arguments.keep
    fully_shard(model.embedding, reshard_after_forward=reshard, **options)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard, **options)
    fully_shard([model.norm, model.head], reshard_after_forward=False, **options)
    fully_shard(model, **options)
    model.embedding.set_unshard_in_backward(False)  # its backward needs the tokens only
    units = [model.embedding, *model.blocks, model.head]
    if arguments.prefetch > 0:
        for index, unit in enumerate(units):
            unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + arguments.prefetch])
            before = units[max(1, index - arguments.prefetch) : max(1, index)]
            unit.set_modules_to_backward_prefetch(before[::-1])


def build(arguments):
    """The model with its values, on the device; nothing of it was ever larger there."""
    with torch.device("meta"):
        model = Llama(arguments)
    if arguments.compile:
        for block in model.blocks:  # the forward, not the call: FSDP2's hooks stay outside of the compiled code
            block.forward = torch.compile(block.forward)
    if arguments.row == "fsdp2":
        shard(model, arguments)
    else:
        model.to(torch.bfloat16)
    model.to_empty(device=arguments.device)
    fill(model)
    return model


def make_step(model, arguments, rank):
    """The step as a function without arguments; it returns the loss, still on the device."""
    generator = torch.Generator().manual_seed(1 + rank)
    shape = (arguments.batch, arguments.sequence + 1)
    window = torch.randint(0, arguments.vocabulary, shape, generator=generator).to(arguments.device)
    tokens, targets = window[:, :-1].contiguous(), window[:, 1:].contiguous()
    parameters = list(model.parameters())
    optimizer = None
    if arguments.optimizer:
        optimizer = torch.optim.AdamW(parameters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step():
        for parameter in parameters:
            parameter.grad = None
        for index in range(arguments.microbatches):
            if arguments.no_sync:
                model.set_requires_gradient_sync(index + 1 == arguments.microbatches)
            loss = model(tokens, targets)
            loss.backward()
        if optimizer is not None:
            optimizer.step()
        return loss.detach()

    return step


class CudaDevice:
    """Times steps and reads memory on the GPU of this process."""

    def __init__(self, index):
        torch.cuda.set_device(index)
        self.synchronize = torch.cuda.synchronize

    def timed(self, step):
        """(loss, device ms, host ms) of one step."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        started = time.perf_counter()
        begin.record()
        loss = step()
        end.record()
        host = time.perf_counter() - started
        end.synchronize()
        return loss, begin.elapsed_time(end), 1e3 * host

    def taken_gib(self):
        free, total = torch.cuda.mem_get_info()
        return (total - free) / GIB

    def forget_peaks(self):
        torch.cuda.reset_peak_memory_stats()

    def release_cached(self):
        torch.cuda.empty_cache()

    def peaks_gib(self):
        return torch.cuda.max_memory_allocated() / GIB, torch.cuda.max_memory_reserved() / GIB


class CpuDevice:
    """The same face where there is no GPU: the host's time is the step's, memory is not known."""

    def synchronize(self):
        pass

    def timed(self, step):
        started = time.perf_counter()
        loss = step()
        milliseconds = 1e3 * (time.perf_counter() - started)
        return loss, milliseconds, milliseconds

    def taken_gib(self):
        return None

    def forget_peaks(self):
        pass

    def release_cached(self):
        pass

    def peaks_gib(self):
        return None, None


class Meeting:
    """Lets the ranks meet, and agree on a number, through torch's store: also where nothing else connects them."""

    def __init__(self, rank, ranks):
        from torch.distributed import PrefixStore, TCPStore

        self.rank, self.ranks = rank, ranks
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.store = TCPStore(address, port, ranks, is_master=rank == 0)
        self.group_store = PrefixStore("group", self.store)

    def wait(self, place):
        self.store.set(f"{place}/{self.rank}", "")
        self.store.wait([f"{place}/{rank}" for rank in range(self.ranks)])

    def agree(self, key, value):
        """Rank 0's `value`, an int, on every rank."""
        if self.rank == 0:
            self.store.set(key, str(value))
        return int(self.store.get(key))

    def leave(self):
        """Rank 0, which serves the store, goes last."""
        self.store.set(f"left/{self.rank}", "")
        if self.rank == 0:
            self.store.wait([f"left/{rank}" for rank in range(self.ranks)])


def measure(step, device, meeting, arguments):
    """Warms up and times the steps; the lists and peaks of the line that is printed."""
    for _ in range(FIRST_STEPS):
        step()
    device.synchronize()
    gc.collect()
    gc.freeze()
    gc.disable()  # as large trainers do: no pause of the collector falls into a step
    meeting.wait("warm")
    _, milliseconds, _ = device.timed(step)
    # One count for all ranks, since their steps meet in collectives.
    for _ in range(meeting.agree("warm_steps", math.ceil(1e3 * arguments.warm_seconds / milliseconds))):
        device.timed(step)
    device.forget_peaks()
    meeting.wait("timed")
    ms, host_ms, taken = [], [], []
    for _ in range(arguments.steps):
        loss, milliseconds, host = device.timed(step)
        ms.append(round(milliseconds, 4))
        host_ms.append(round(host, 4))
        taken.append(device.taken_gib())
    allocated, reserved = device.peaks_gib()
    return {
        "ms": ms,
        "host_ms": host_ms,
        "allocated_gib": allocated,
        "reserved_gib": reserved,
        "taken_gib": max(taken) if taken[0] is not None else None,
        "loss": loss.item(),
    }


def run_rank(arguments):
    """One rank: builds, measures and returns the line that is printed."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "4")))
    device = CudaDevice(int(os.environ["LOCAL_RANK"])) if arguments.device == "cuda" else CpuDevice()
    meeting = Meeting(rank, ranks)
    with contextlib.ExitStack() as stack:
        if arguments.row == "fsdp2":
            import torch.distributed as dist

            on_gpu = arguments.device == "cuda"
            dist.init_process_group("nccl" if on_gpu else "gloo", store=meeting.group_store,
                                    rank=rank, world_size=ranks,
                                    device_id=torch.device("cuda", torch.cuda.current_device()) if on_gpu else None)
            stack.callback(dist.destroy_process_group)
        model = build(arguments)
        parameters = sum(parameter.numel() for parameter in model.parameters())  # of a DTensor: all ranks' parts
        device.release_cached()
        figures = measure(make_step(model, arguments, rank), device, meeting, arguments)
        meeting.wait("end")  # a communicator ends on all ranks together
    meeting.leave()
    return {"row": arguments.row, "rank": rank, **figures, "parameters": parameters,
            "tokens": arguments.microbatches * arguments.batch * arguments.sequence}


def main():
    arguments = parse_arguments()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = ", ".join(name for name in names if name not in os.environ)
    if missing:
        sys.exit(f"fsdp2_gpu: {missing} not set: benchmarks/bench_gpu.py starts one process per GPU with them")
    os.write(1, (json.dumps(run_rank(arguments)) + "\n").encode())  # in one piece: the ranks may share the stream


if __name__ == "__main__":
    main()
