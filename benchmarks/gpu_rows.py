"""What bench_gpu.py measures: the shapes of the model and the rows of the table, as plain data."""

import dataclasses

# H200 and H100 SXM, dense bf16 on tensor cores, from the data sheet. TFLOP/s of one GPU.
PEAK_TFLOPS = 989.0
ADAMW = "+adamw"  # the end of a row's name when its step has the optimizer


@dataclasses.dataclass(frozen=True)
class Shape:
    """A Llama with an untied head, and what one GPU gets per step."""

    layers: int
    dim: int
    ffn: int
    heads: int
    kv_heads: int
    vocabulary: int
    sequence: int
    batch: int  # sequences per GPU and microbatch
    microbatches: int = 1
    experts: int = 0  # feed-forward parts per block, of which each token goes through so many
    active_experts: int = 2
    adapter_rank: int = 0  # above 0: only adapters of this rank on the linear layers of the blocks are trained

    def _kv_dim(self):
        return self.kv_heads * self.dim // self.heads

    def _block(self, feed_forwards):
        attention = 2 * self.dim * self.dim + 2 * self.dim * self._kv_dim()
        return attention + feed_forwards * 3 * self.dim * self.ffn + self.experts * self.dim

    def _adapters(self):
        pairs = [(self.dim, self.dim)] * 2 + [(self.dim, self._kv_dim())] * 2 + [(self.dim, self.ffn)] * 3
        return self.layers * self.adapter_rank * sum(a + b for a, b in pairs)

    def matmul_parameters(self):
        """Weights that every token is multiplied with: all but the embedding, the norms and the experts it leaves out."""
        block = self._block(self.active_experts if self.experts else 1)
        return self.layers * block + self.vocabulary * self.dim

    def parameters(self):
        held = self.layers * self._block(self.experts or 1) + 2 * self.vocabulary * self.dim
        return held + (2 * self.layers + 1) * self.dim + self._adapters()

    def tokens(self):
        """Tokens of one GPU's step."""
        return self.microbatches * self.batch * self.sequence

    def flops_per_token(self):
        """Forward and backward without recompute: 6 per weight of a product, and for attention 6 * layers * sequence *
        dim: of the 12 of full attention (two products of 2 * sequence * dim forward, twice that backward) a causal
        mask leaves half. (The counting of Chowdhery et al. 2022, appendix B, with the mask taken into account.) A frozen
        weight has no gradient: 4 of the 6.
        """
        if self.adapter_rank:
            return 4 * self.matmul_parameters() + 6 * self._adapters() + 6 * self.layers * self.sequence * self.dim
        return 6 * self.matmul_parameters() + 6 * self.layers * self.sequence * self.dim

    def arguments(self):
        """For the command line of a row's program."""
        pairs = [(f"--{field.name.replace('_', '-')}", getattr(self, field.name)) for field in dataclasses.fields(self)]
        return [str(part) for pair in pairs for part in pair]


def _large(batch, microbatches=1):
    return Shape(layers=16, dim=4096, ffn=14336, heads=32, kv_heads=8, vocabulary=128256, sequence=4096, batch=batch,
                 microbatches=microbatches)


SHAPES = {
    "4.54b-1": _large(batch=1),
    "4.54b-2": _large(batch=2),
    # Llama 3 8B's: twice the blocks.
    "8.03b": dataclasses.replace(_large(batch=1), layers=32),
    # Microbatches of one optimizer step: where the strategies differ.
    "microbatches": _large(batch=1, microbatches=4),
    # A mixture of experts: 8 per block, 2 for each token.
    "experts": Shape(layers=8, dim=2048, ffn=4096, heads=16, kv_heads=4, vocabulary=32000, sequence=4096, batch=4,
                     experts=8, active_experts=2),
    # Adapters on a frozen base.
    "adapters": dataclasses.replace(_large(batch=1), adapter_rank=16),
    # Bound by the host: its kernels are short.
    "small": Shape(layers=24, dim=1024, ffn=2816, heads=16, kv_heads=4, vocabulary=32000, sequence=1024, batch=1),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One program in one mode. Every run of it is a new process per GPU."""

    name: str
    program: str  # "ours" or "peer"
    arguments: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    optimizer: bool = False
    default: bool = True  # measured when --rows names nothing

    def command_arguments(self):
        return [*self.arguments, *(["--optimizer"] if self.optimizer else [])]


KEEP_ALL = ("--keep-gib", "-1")  # full weights stay where they are until the next step's


def _ours(name, *more, kind=None, **options):
    return Row(name, "ours", ("--row", kind or name, *more), **options)


def _fsdp2(name, *more, **options):
    return Row(name, "peer", ("--row", "fsdp2", *more), **options)


EXPANDABLE = (("PYTORCH_ALLOC_CONF", "expandable_segments:True"),)
FLOORS = ("floor-bf16", "floor-fp32")
# FSDP2 in eager mode with fp32 reduce, resharding as it does by default, by how far it gathers ahead. The fastest one
# measured is what "over FSDP2" compares with; fsdp2-keep, which takes more memory, has a sentence of its own.
FSDP2_EAGER = ("fsdp2", "fsdp2-prefetch0", "fsdp2-prefetch1", "fsdp2-prefetch3")

_UNSHARDED = [
    Row("floor-bf16", "ours", ("--row", "floor", "--wgrad", "bf16")),
    Row("floor-fp32", "ours", ("--row", "floor", "--wgrad", "fp32")),
    Row("floor-recompute", "ours", ("--row", "floor", "--wgrad", "bf16", "--recompute", "non_reentrant"), default=False),
    Row("plain", "peer", ("--row", "plain")),
]
_SHARDED = [
    _ours("ours", *KEEP_ALL),
    _fsdp2("fsdp2"),
    _ours("ours-reshard", kind="ours"),
    _fsdp2("fsdp2-keep", "--keep"),
    _ours("ours-copy", *KEEP_ALL),
    _ours("ours-nccl", *KEEP_ALL),
    _ours("ours-graph", *KEEP_ALL),
    _ours("ours-bf16", *KEEP_ALL, "--wire", "bf16", kind="ours"),
    _fsdp2("fsdp2-bf16", "--reduce", "bf16"),
    _fsdp2("fsdp2-compiled", "--compile"),
    _fsdp2("fsdp2-expandable", environment=EXPANDABLE),
    _ours("ours-slots", *KEEP_ALL, "--late-elements", "-1", kind="ours", default=False),
    _ours("ours-optim", "--strategy", "optim", kind="ours", default=False),
    _ours("ours-optim-copy", "--strategy", "optim", kind="ours-copy", default=False),
    _ours("ours-optim-grads", "--strategy", "optim_grads", kind="ours", default=False),
    _ours("ours-no-shard", "--strategy", "no_shard", kind="ours", default=False),
    _ours("ours-hybrid", *KEEP_ALL, "--replicas", "2", kind="ours", default=False),
    _ours("ours-hybrid-parted", *KEEP_ALL, "--replicas", "2", "--optimizer-over-replicas", kind="ours", default=False),
    _fsdp2("fsdp2-hybrid", "--prefetch", "1", "--replicas", "2", default=False),
    _ours("ours-recompute", *KEEP_ALL, "--recompute", "non_reentrant", kind="ours", default=False),
    _ours("ours-reentrant", *KEEP_ALL, "--recompute", "reentrant", kind="ours", default=False),
    _ours("ours-delayed", *KEEP_ALL, "--delay-wgrad", kind="ours", default=False),
    _ours("ours-offload", *KEEP_ALL, "--offload", kind="ours", default=False),
    _fsdp2("fsdp2-recompute", "--prefetch", "1", "--recompute", default=False),
    _fsdp2("fsdp2-nosync", "--keep", "--no-sync", default=False),
    *(_fsdp2(f"fsdp2-prefetch{depth}", "--prefetch", str(depth), default=depth == 1) for depth in (0, 1, 3)),
]


OF_THEIR_OWN = ("8.03b", "microbatches", "experts", "adapters")


def _with_optimizer(row):
    return dataclasses.replace(row, name=row.name + ADAMW, optimizer=True)


# In the order in which a round runs them: what a budget leaves out first comes last.
ROWS = {row.name: row for row in [*_UNSHARDED, *(both for row in _SHARDED for both in (row, _with_optimizer(row)))]}


def select_shapes(names):
    """The shapes called `names`, "4.54b" meaning both batches; when it is empty all but those that have rows of their own.
    Throws ValueError.
    """
    chosen = []
    for name in names or [shape for shape in SHAPES if shape not in OF_THEIR_OWN]:
        found = [shape for shape in SHAPES if shape == name or shape.rpartition("-")[0] == name]
        if not found:
            raise ValueError(f"shape {name}: not one of {', '.join(['4.54b', *SHAPES])}")
        chosen += [shape for shape in found if shape not in chosen]
    return chosen


def select_rows(names, optimizer=None):
    """Names of rows in the order of a round. `names`: a row's own name, or that without +adamw for the row with and
    without the optimizer, or =NAME for that row alone; empty: all default rows. `optimizer`: None both, True only with, False
    only without; rows that have no optimizer at all (floor, plain) are references and stay. Throws ValueError.
    """
    for name in (name.removeprefix("=") for name in names):
        if name not in ROWS:
            raise ValueError(f"row {name}: not one of {', '.join(ROWS)}")

    def chosen(row):
        if names:
            return {row.name, "=" + row.name, row.name.removesuffix(ADAMW)} & set(names)
        return row.default

    def wanted(row):
        has_both = row.name.removesuffix(ADAMW) + ADAMW in ROWS
        return optimizer is None or not has_both or row.optimizer == optimizer

    return [row.name for row in ROWS.values() if chosen(row) and wanted(row)]
