"""The C++ extension (csrc/python). Nothing here checks shapes or dtypes: use `pace.ops`.

csrc/python/records.h reads tensors and records. Other addresses are integers from `Tensor.data_ptr()`, 0 for none.
Dtypes are the numbers of csrc/include/pace/types.h."""

from torch import Tensor

from pace.batch import ForwardBatch, Spans
from pace.graph.recorded.heads import Rotation
from pace.ops.adapters import AdapterTable
from pace.ops.experts import Activation, Router
from pace.ops.kernels.experts import ExpertStack
from pace.ops.kernels.norm import GatedNormParameters, NormParameters
from pace.ops.protocol import AttentionOptions, ExpertOptions, RecurrenceOptions
from pace.ops.weight import PackedWeight
from pace.states import StateSlots, StateSpans

# Instruction sets, threads, machine.
def isa() -> str:
    """The instruction set in use; PACE_ISA chooses the first one."""

def select_isa(name: str) -> None:
    """Changes the instruction set in use. Weights packed for another layout are refused from then on. Raises ValueError
    for one that is unknown, or that this CPU or this build lacks."""

def available_isas() -> list[str]:
    """Instruction sets of this build that this CPU can run, best first; those for tests come last."""

def built_isas() -> list[str]:
    """Instruction sets of this build, best first; those for tests come last."""

def best_isa() -> str:
    """The best instruction set that this CPU can run, in this build or not."""

def set_num_threads(count: int, pinned: bool = False) -> None:
    """With `pinned`, every thread has a CPU of its own; the calling one only while kernels run. Raises ValueError for
    more than there are."""

def get_num_threads() -> int: ...
def pinned_cpus() -> list[int]:
    """The CPU of each thread, the caller's first; empty where they are not pinned."""

def cpus_to_pin(count: int) -> list[int]:
    """Where so many threads would be pinned now. ValueError for more than the affinity mask holds."""

def cpu_info() -> dict[str, object]:
    """model_name, features, logical_cpus, physical_cores, numa_nodes, quota_cpus, quota_source, default_threads,
    threads_reason."""

def release_pages(address: int, nbytes: int) -> None:
    """Gives the whole pages inside a range back to the system. File mappings are read again on use; other memory
    becomes zero."""

def read_bandwidth(buffer_bytes: int, seconds: float) -> float:
    """Bytes a second that all threads read together from a buffer of this size."""

def fma_peak(seconds: float) -> float:
    """fp32 operations a second of multiply-adds on registers, all threads together."""

def xxh64(data: object) -> int:
    """XXH64, with seed 0, of the bytes of a contiguous buffer. Raises BufferError for another one."""

# Packed weights and linear layers. `order`: the address of the int32 order of columns of a quantised weight.
class PackedFormat:
    """A dtype, or codes if `code` is not 0; then dtype is 0, float32. `group` is 0 for one scale a row, `levels` the
    address of 16 int8."""

    def __init__(
        self, dtype: int, code: int = 0, group: int = 0, has_mins: bool = False, levels: int = 0, offset: int = -1,
        group_scales: int = 0, token_inputs: bool = False,
    ) -> None: ...  # fmt: skip

# Parts of a weight, from the top down: rows, and how they are stored.
def packed_bytes(parts: list[tuple[int, PackedFormat]], k: int, glu: bool) -> int: ...
def init_packed(weight: int, parts: list[tuple[int, PackedFormat]], k: int, glu: bool) -> None: ...
def is_packed(weight: int, parts: list[tuple[int, PackedFormat]], k: int, glu: bool) -> bool:
    """True if memory holds the headers that init_packed writes."""

def place_packed(weight: int) -> None:
    """Makes the pages of a weight of zeros resident, each on the NUMA node of the thread that will read it."""

def pack_rows(weight: int, row: int, rows: int, source: int, source_dtype: int, source_stride: int) -> None: ...
def pack_codes(
    weight: int, row: int, rows: int, codes: int, codes_stride: int, scales: int, mins: int, paired: bool
) -> None: ...
def pack_super_blocks(
    weight: int, row: int, rows: int, codes: int, codes_stride: int, group_scales: int, group_mins: int, scales: int,
    mins: int,
) -> None: ...  # fmt: skip
def quantize_rows(
    quantizer: int, source: int, source_dtype: int, source_stride: int, rows: int, k: int, group: int,
    rounds_scales: bool, bounds: int, bound_count: int, code_of_level: int, codes: int, nibbles: bool, scales: int,
    mins: int, super_scales: int, super_mins: int,
) -> bool:  # fmt: skip
    """Returns False if an element of the source is not finite; the outputs are then incomplete."""

def unpack_blocks(
    type: int, source: int, stride: int, rows: int, k: int, codes: int, scales: int, mins: int, super_scales: int,
    super_mins: int,
) -> None: ...  # fmt: skip
def pack_blocks(weight: int, row: int, rows: int, type: int, source: int, stride: int) -> bool:
    """Returns False if a scale is not finite."""

def gather_rows(weight: PackedWeight, ids: Tensor | None, count: int, out: Tensor, widen: bool) -> None:
    """Without ids, rows 0 to count - 1."""

def linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    activation: Activation | None,
    residual: Tensor | None,
    out: Tensor,
    apart: bool,
) -> None:
    """`apart`: a weight with glu gives gate and up side by side."""

def activation(activation: Activation, x: Tensor, y: Tensor) -> None: ...
def glu(activation: Activation, x: Tensor, y: Tensor) -> None: ...
def add_adapters(y: Tensor, x: Tensor, adapters: AdapterTable, routing: Tensor) -> None: ...

# Mixtures of experts.
def route(
    logits: Tensor, router: Router, choice_bias: Tensor | None, expert_scale: Tensor | None, routing: Tensor
) -> None: ...
def experts(
    x: Tensor, routing: Tensor, count: int, gate_up: ExpertStack, down: ExpertStack, options: ExpertOptions,
    residual: Tensor | None, out: Tensor,
) -> None: ...  # fmt: skip
def heads_linear(x: Tensor, weights: ExpertStack, out: Tensor) -> None: ...

# Norms and rows of logits.
def norm(x: Tensor, norm: NormParameters, y: Tensor) -> None: ...
def head_norm(x: Tensor, norm: NormParameters) -> None: ...
def scale(x: Tensor, factor: float, factors: Tensor | None = None) -> None: ...
def softcap(x: Tensor, cap: float) -> None: ...
def place_rows(x: Tensor, rows: Tensor, at: Tensor | None, add: bool) -> None:
    """Without `at`, row r of x is row r of `rows`."""

def pool(x: Tensor, pooling: str, starts: Tensor, count: int, out: Tensor) -> None: ...
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
    max_top: int,
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
MAX_HEAD_DIM: int
"""Maximum number of elements in a head's key or value."""

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
    kv: KvView, q: Tensor, latent_q: Tensor | None, spans: Spans, options: AttentionOptions, out: Tensor
) -> None: ...
def store_kv(kv: KvView, k: Tensor, v: Tensor, slots: Tensor) -> None: ...
def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None: ...

# Layers with a state, and gates. `weight` of a convolution is `[L, C]`.
def gate(x: Tensor, gates: Tensor, activation: str | None) -> None: ...
def gated_norm(x: Tensor, gate: Tensor, norm: GatedNormParameters, y: Tensor) -> None: ...
def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, slots: StateSlots, spans: StateSpans, out: Tensor
) -> None: ...
def recurrence(
    q: Tensor, k: Tensor, v: Tensor, steps: Tensor, beta: Tensor | None, slots: StateSlots, spans: StateSpans,
    options: RecurrenceOptions, out: Tensor,
) -> None: ...  # fmt: skip

# Recorded programs (csrc/include/pace/program.h); pace.graph makes them.
class Value:
    def __init__(self, buffer: int, columns: int, per_token: bool) -> None: ...

class Columns:
    """Columns `first .. first + count` of a value, as an input."""

    def __init__(self, value: Value, first: int, count: int) -> None: ...

class Heads:
    def __init__(self, value: Value, column: int, count: int, head_dim: int, stride: int) -> None: ...

class Preparation:
    def __init__(
        self,
        k: Heads | None,
        v: Heads | None,
        query_norm: NormParameters | None,
        key_norm: NormParameters | None,
        value_norm: NormParameters | None,
        rotation: Rotation | None,
        norm_last: bool,
    ) -> None: ...

class Batch:
    """The addresses of a batch's arrays, which must outlive it."""

    def __init__(self, batch: ForwardBatch) -> None: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_logit_rows(self) -> int: ...

class KvCache:
    """The caches of a program's layers. For each, a view and the index of the group of layers, or its slots."""

    def __init__(self, layers: list[tuple[KvView, int] | StateSlots]) -> None: ...

class Program:
    """Keeps addresses only: weights, parameters and caches must outlive it. `neighbour`: a program that never runs at
    the same time, whose buffers it uses too."""

    def __init__(self, widths: list[int], neighbour: Program | None = None) -> None: ...
    def embedding(self, out: Value, weight: PackedWeight, ids: str, offset: int) -> None:
        """`ids`: "tokens", "positions" or "types" of the step."""

    def input_rows(self, out: Value, number: int) -> None: ...
    def given_rows(self, out: Value, first: int) -> None: ...
    def place_rows(self, x: Columns, first: int, add: bool) -> None: ...
    def gather_rows(self, out: Value, x: Columns) -> None: ...
    def keep_rows(self, x: Columns, first: int) -> None: ...
    def pool(self, out: Value, x: Columns, pooling: str) -> None: ...
    def concatenate(self, out: Value, a: Columns, b: Columns) -> None: ...
    def add(self, out: Value, a: Columns, b: Columns) -> None: ...
    def activation(self, out: Value, x: Columns, activation: Activation) -> None: ...
    def scale(self, x: Columns, factor: float, factors: Tensor | None = None) -> None: ...
    def softcap(self, x: Columns, cap: float) -> None: ...
    def norm(self, out: Value, x: Columns, norm: NormParameters, residual: Columns | None, factor: float) -> None: ...
    def linear(
        self,
        out: Value,
        x: Columns,
        norm: NormParameters | None,
        weight: PackedWeight,
        bias: Tensor | None,
        activation: Activation | None,
        residual: Value | None,
        apart: bool,
        adapters: AdapterTable | None,
    ) -> None: ...
    def glu(self, out: Value, x: Columns, activation: Activation) -> None: ...
    def add_adapters(self, y: Columns, x: Columns, norm: NormParameters | None, adapters: AdapterTable) -> None: ...
    def gate(self, x: Columns, gate: Columns, activation: str | None) -> None: ...
    def gated_norm(self, out: Value, x: Columns, gate: Columns, norm: GatedNormParameters) -> None: ...
    def causal_conv(
        self, out: Value, x: Columns, layer: int, weight: Tensor, bias: Tensor | None, silu: bool
    ) -> None: ...
    def recurrence(
        self, out: Value, q: Heads, k: Heads, v: Heads, steps: Columns, beta: Columns | None, layer: int,
        options: RecurrenceOptions,
    ) -> None: ...  # fmt: skip
    def route(
        self, out: Value, logits: Columns, router: Router, choice_bias: Tensor | None, expert_scale: Tensor | None
    ) -> None: ...
    def experts(
        self, out: Value, x: Columns, norm: NormParameters | None, choices: Value, router: Router | None,
        choice_bias: Tensor | None, expert_scale: Tensor | None, count: int, gate_up: ExpertStack, down: ExpertStack,
        options: ExpertOptions, residual: Value | None,
    ) -> None:  # fmt: skip
        """Without a router, `choices` is a routing; with it, logits."""

    def norm_heads(self, heads: Heads, norm: NormParameters) -> None: ...
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
        options: AttentionOptions,
    ) -> None: ...
    def run(
        self,
        cache: KvCache,
        batch: Batch,
        angles: list[tuple[int, int]],
        inputs: list[int],
        logits: int,
        finds_largest: bool,
    ) -> None: ...
    def set_profiling(self, on: bool) -> None: ...
    def timings(self) -> list[tuple[str, int, float]]: ...
    @property
    def num_instructions(self) -> int: ...
    @property
    def barriers(self) -> int: ...
    @property
    def buffer_bytes(self) -> int: ...

# Vocabularies. `read_strings` returns strings of a GGUF file and where they end; it raises EOFError if they continue
# beyond `end`. `find_merges`: `pieces` are texts, None for a token that is no piece; `order` is a vector of uint32.
def read_strings(data: object, position: int, end: int, count: int) -> tuple[list[str], int]: ...
def find_merges(pieces: list[str | None], order: object) -> list[tuple[str, str]]: ...
