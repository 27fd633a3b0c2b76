"""The C++ extension (csrc/python). Addresses are integers from `Tensor.data_ptr()`, 0 for none; dtypes and activations are the
numbers of csrc/include/pace/types.h. Nothing here checks shapes: use `pace.ops`."""

# Instruction sets, threads, machine.
def isa() -> str:
    """The instruction set in use; PACE_ISA chooses the first one."""

def select_isa(name: str) -> None:
    """Changes the instruction set in use. Weights packed for another layout are refused from then on. ValueError for one that
    is unknown, or that this CPU or this build lacks."""

def available_isas() -> list[str]:
    """Instruction sets of this build that this CPU can run, best first; those for tests come last."""

def built_isas() -> list[str]:
    """Instruction sets of this build, best first; those for tests come last."""

def best_isa() -> str:
    """The best instruction set that this CPU can run, in this build or not."""

def set_num_threads(count: int, pinned: bool = False) -> None:
    """With `pinned`, every thread on a CPU of its own; the calling one only while kernels run. ValueError for more than there are."""

def get_num_threads() -> int: ...
def pinned_cpus() -> list[int]:
    """The CPU of each thread, the caller's first; empty where they are not pinned."""

def cpus_to_pin(count: int) -> list[int]:
    """Where so many threads would be pinned now. ValueError for more than the affinity mask holds."""

def cpu_info() -> dict[str, object]:
    """model_name, features, logical_cpus, physical_cores, numa_nodes, quota_cpus, quota_source, default_threads, threads_reason."""

def release_pages(address: int, nbytes: int) -> None:
    """Gives the whole pages inside a range back to the system: file mappings are read again on use, other memory becomes zero."""

def read_bandwidth(buffer_bytes: int, seconds: float) -> float:
    """Bytes a second that all threads read together from a buffer of this size."""

def fma_peak(seconds: float) -> float:
    """fp32 operations a second of multiply-adds on registers, all threads together."""

# Packed weights and linear layers. `order`: the address of the int32 order of columns of a quantised weight.
class PackedFormat:
    """A dtype, or, if code is not 0, codes; then dtype is 0, float32. group is 0 for one scale a row, levels an address of 16 int8."""

    def __init__(
        self, dtype: int, code: int = 0, group: int = 0, has_mins: bool = False, levels: int = 0, offset: int = -1,
        group_scales: int = 0,
    ) -> None: ...  # fmt: skip

# Parts of a weight, from the top down: rows, and how they are stored.
def packed_bytes(parts: list[tuple[int, PackedFormat]], k: int, glu: bool) -> int: ...
def init_packed(weight: int, parts: list[tuple[int, PackedFormat]], k: int, glu: bool) -> None: ...
def is_packed(weight: int, parts: list[tuple[int, PackedFormat]], k: int, glu: bool) -> bool:
    """Whether memory holds the headers that init_packed writes."""

def place_packed(weight: int) -> None:
    """Of a weight of zeros: its pages become resident, each next to the thread that will read it."""

def pack_rows(weight: int, row: int, rows: int, source: int, source_dtype: int, source_stride: int) -> None: ...
def pack_codes(
    weight: int, row: int, rows: int, codes: int, codes_stride: int, scales: int, mins: int, paired: bool
) -> None: ...
def pack_super_blocks(
    weight: int, row: int, rows: int, codes: int, codes_stride: int, group_scales: int, group_mins: int, scales: int, mins: int,
) -> None: ...  # fmt: skip
def quantize_rows(
    quantizer: int, source: int, source_dtype: int, source_stride: int, rows: int, k: int, group: int, rounds_scales: bool,
    bounds: int, bound_count: int, code_of_level: int, codes: int, nibbles: bool, scales: int, mins: int,
    super_scales: int, super_mins: int,
) -> bool:  # fmt: skip
    """False where an element of the source is not finite: nothing that was written counts then."""

def unpack_blocks(
    type: int, source: int, stride: int, rows: int, k: int, codes: int, scales: int, mins: int, super_scales: int, super_mins: int,
) -> None: ...  # fmt: skip
def pack_blocks(weight: int, row: int, rows: int, type: int, source: int, stride: int) -> bool:
    """False where a scale is not finite."""

def gather_rows(weight: int, order: int, ids: int, count: int, out: int, widen: bool) -> None: ...
def linear(
    x: int, x_stride: int, rows: int, weight: int, order: int, bias: int, activation: int, residual: int, out: int
) -> None: ...
def activation(kind: int, x: int, rows: int, k: int, y: int) -> None: ...

# Mixtures of experts. `score`: of `SCORES` in pace/ops/experts.py; `choice_bias` and `bias`: addresses, or 0.
class Router:
    def __init__(
        self, score: int, experts: int, top_k: int, groups: int, kept_groups: int, group_top2: bool, normalise: bool, eps: float,
        least_sum: float, scale: float, jitter: float, choice_bias: int,
    ) -> None: ...  # fmt: skip

class ExpertStack:
    def __init__(self, weights: int, stride: int, bias: int, mapped: bool = False) -> None:
        """mapped: pages of a file, asked for once rows have chosen."""

def route(logits: int, stride: int, rows: int, router: Router, routing: int) -> None: ...
def experts(
    x: int, x_stride: int, rows: int, routing: int, count: int, top_k: int, gate_up: ExpertStack, down: ExpertStack,
    activation: int, alpha: float, limit: float, weighs_input: bool, residual: int, out: int,
) -> None: ...  # fmt: skip
def heads_linear(
    x: int, token_stride: int, head_stride: int, rows: int, heads: int, weights: ExpertStack, out: int
) -> None: ...
def gate(x: int, x_stride: int, rows: int, k: int, gates: int, gate_stride: int) -> None: ...

# Norms and rows of logits.
def norm(
    layer: bool,
    x: int,
    x_stride: int,
    weight: int,
    bias: int,
    eps: float,
    rows: int,
    k: int,
    y: int,
) -> None: ...
def head_norm(
    layer: bool,
    x: int,
    tokens: int,
    heads: int,
    head_dim: int,
    token_stride: int,
    head_stride: int,
    weight: int,
    weight_stride: int,
    eps: float,
) -> None: ...
def scale(x: int, x_stride: int, rows: int, k: int, factor: float) -> None: ...
def softcap(x: int, x_stride: int, rows: int, k: int, cap: float) -> None: ...
def argmax(logits: int, row_stride: int, rows: int, n: int, indices: int) -> None: ...
def apply_mask(logits: int, row_stride: int, n: int, bits: int, bits_stride: int, masks: int, rows: int) -> None: ...
def sample(
    logits: int,
    row_stride: int,
    n: int,
    count: int,
    rows: int,
    rules: int,
    rules_bytes: int,
    uniform: int,
    edit_ends: int,
    edit_lists: int,
    masks: int,
    masks_stride: int,
    mask_rows: int,
    tokens: int,
    num_top: int,
    most_top: int,
    values: int,
    top_tokens: int,
    top_values: int,
) -> None: ...
def logprobs(
    logits: int,
    row_stride: int,
    n: int,
    count: int,
    top: int,
    rows: int,
    tokens: int,
    values: int,
    top_tokens: int,
    top_values: int,
) -> None: ...

# Attention.
BLOCK_POSITIONS: int
"""Positions in a key/value block."""

class KvView:
    """One layer's key/value blocks."""

    def __init__(
        self,
        k: int,
        v: int,
        k_block_stride: int,
        v_block_stride: int,
        dtype: int,
        num_blocks: int,
        kv_heads: int,
        key_dim: int,
        value_dim: int,
    ) -> None: ...

def attention(
    kv: KvView,
    q: int,
    q_token_stride: int,
    q_head_stride: int,
    latent_q: int,
    latent_token_stride: int,
    latent_head_stride: int,
    tokens: int,
    query_heads: int,
    scale: float,
    window: int,
    chunked: bool,
    softcap: float,
    sinks: int,
    query_start: int,
    kv_len: int,
    block_table: int,
    spans: int,
    table_stride: int,
    out: int,
) -> None: ...
def store_kv(
    kv: KvView,
    k: int,
    k_token_stride: int,
    k_head_stride: int,
    v: int,
    v_token_stride: int,
    v_head_stride: int,
    slots: int,
    tokens: int,
) -> None: ...
def rotary(
    x: int,
    tokens: int,
    heads: int,
    token_stride: int,
    head_stride: int,
    cos: int,
    sin: int,
    half: int,
    interleaved: bool,
) -> None: ...

# Recorded programs (csrc/include/pace/program.h); pace.graph makes them.
class Value:
    def __init__(self, buffer: int, columns: int, per_token: bool) -> None: ...

class Columns:
    """Columns `first .. first + count` of a value, as an input."""

    def __init__(self, value: Value, first: int, count: int) -> None: ...

class Heads:
    def __init__(self, value: Value, column: int, count: int, head_dim: int, stride: int) -> None: ...

class Norm:
    def __init__(self, kind: str, weight: int, bias: int, eps: float, head_stride: int) -> None: ...

class Rotation:
    def __init__(self, table: int, half: int, interleaved: bool) -> None: ...

class Preparation:
    def __init__(
        self,
        k: Heads,
        v: Heads,
        query_norm: Norm | None,
        key_norm: Norm | None,
        value_norm: Norm | None,
        rotation: Rotation | None,
        norm_last: bool,
    ) -> None: ...

class KvCache:
    """What the attention of a program reads and writes: a view for each layer, and which of a step's tables are its."""

    def __init__(self, layers: list[tuple[KvView, int]]) -> None: ...

class Program:
    """Keeps addresses only: weights, parameters and caches must outlive it."""

    def __init__(self, widths: list[int]) -> None: ...
    def embedding(self, out: Value, weight: int, order: int, positions: bool, offset: int) -> None: ...
    def gather_rows(self, out: Value, x: Columns) -> None: ...
    def add(self, out: Value, a: Columns, b: Columns) -> None: ...
    def activation(self, out: Value, x: Columns, activation: int) -> None: ...
    def scale(self, x: Columns, factor: float) -> None: ...
    def softcap(self, x: Columns, cap: float) -> None: ...
    def norm(self, out: Value, x: Columns, norm: Norm) -> None: ...
    def linear(
        self,
        out: Value,
        x: Columns,
        norm: Norm | None,
        weight: int,
        order: int,
        bias: int,
        activation: int,
        residual: Value | None,
    ) -> None: ...
    def gate(self, x: Columns, gate: Columns) -> None: ...
    def route(self, out: Value, logits: Columns, router: Router) -> None: ...
    def experts(
        self, out: Value, x: Columns, norm: Norm | None, choices: Value, chooses: bool, router: Router, gate_up: ExpertStack,
        down: ExpertStack, activation: int, alpha: float, limit: float, weighs_input: bool, residual: Value | None,
    ) -> None: ...  # fmt: skip
    def norm_heads(self, heads: Heads, norm: Norm) -> None: ...
    def rotate_heads(self, heads: Heads, rotation: Rotation) -> None: ...
    def store_kv(self, k: Heads, v: Heads, layer: int) -> None: ...
    def heads_linear(self, out: Value, x: Heads, weights: ExpertStack) -> None: ...
    def attention(
        self,
        out: Value,
        q: Heads,
        latent_q: Heads | None,
        preparation: Preparation | None,
        layer: int,
        scale: float,
        window: int,
        chunked: bool,
        softcap: float,
        sinks: int,
    ) -> None: ...
    def run(
        self,
        cache: KvCache,
        tokens: int,
        logit_rows: int,
        ids: int,
        positions: int,
        rows: int,
        spans: int,
        query_start: int,
        kv_len: int,
        tables: list[tuple[int, int]],
        table_stride: int,
        angles: list[tuple[int, int]],
        logits: int,
    ) -> None: ...
    def set_profiling(self, on: bool) -> None: ...
    def timings(self) -> list[tuple[str, int, float]]: ...
    @property
    def num_instructions(self) -> int: ...
    @property
    def barriers(self) -> int: ...
    @property
    def buffer_bytes(self) -> int: ...

# Vocabularies. `read_strings`: those of a GGUF file, and where they end; EOFError where they go on beyond `end`.
# `find_merges`: `pieces` are texts, None for what is no piece; `order` is a vector of uint32.
def read_strings(data: object, position: int, end: int, count: int) -> tuple[list[str], int]: ...
def find_merges(pieces: list[str | None], order: object) -> list[tuple[str, str]]: ...
