"""A matrix of a quantised checkpoint: several tensors of its files, read as rows of codes and scales."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from pace.naming import dtype_name
from pace.ops.weight_layout import MIN_GROUP, QuantizedRows, WeightLayout

PIECE_BYTES = 1 << 20
"""Transposed tensors are read in pieces of this size. It bounds a thread's memory if pieces are not aligned and must be
copied."""

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class StoredTensors(Protocol):
    """A checkpoint as its files store it (`CheckpointReader`)."""

    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]

    def read_stored(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows [start, stop) of a tensor of any dtype along its first dimension. The result may be a view of mapped
        memory."""

    def release_stored(self, name: str, start: int = 0, stop: int | None = None) -> None:
        """Releases rows that are not needed for now."""


class StoredMatrix(ABC):
    """The matrix `{module}.weight [N, K]` of a checkpoint, or matrices `[E, N, K]`, made of the tensors in `parts`.

    `dtype` is a WeightLayout if `read` returns QuantizedRows. It is float32 if `read` returns a Tensor, because no
    layout holds these values: groups are not a multiple of 16, or cross rows. Immutable; threads may read different
    rows at once."""

    by_rows: ClassVar[tuple[str, ...]] = ()
    """Roles of the parts whose first dimension is the matrix's rows. Other parts are small, or transposed."""

    shape: tuple[int, ...]
    """Rows are counted through all dimensions but the last."""
    dtype: WeightLayout | torch.dtype
    order: Tensor | None = None
    """`order` of the `QuantizedRows`."""

    def __init__(
        self, source: StoredTensors, module: str, suffixes: Mapping[str, str], optional: Mapping[str, str] = {}
    ):
        """`suffixes`: role -> suffix of the tensor's name. Raises ValueError if one is missing that is not
        `optional`."""
        self.source = source
        self.module = module
        self.parts = {
            role: module + suffix
            for role, suffix in {**suffixes, **optional}.items()
            if module + suffix in source.tensors
        }
        if missing := [module + suffix for role, suffix in suffixes.items() if role not in self.parts]:
            raise ValueError(
                f"the checkpoint has {', '.join(self.parts.values())}, but lacks {', '.join(missing)} of the same "
                "matrix"
            )

    @property
    def name(self) -> str:
        """Name of the matrix in the model."""
        return f"{self.module}.weight"

    @abstractmethod
    def read(self, start: int, stop: int) -> QuantizedRows | Tensor:
        """Reads rows [start, stop). Raises ValueError if scales are not finite."""

    def release(self, start: int, stop: int) -> None:
        """Frees the memory that `read(start, stop)` mapped."""
        for role, name in self.parts.items():
            rows = self._matrices_of(start, stop) if role in self.by_rows else ()
            self.source.release_stored(name, *rows)

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1])

    # -- for subclasses ------------------------------------------------------------------------------------------------

    def has(self, role: str) -> bool:
        return role in self.parts

    def info(self, role: str) -> tuple[torch.dtype, tuple[int, ...]]:
        dtype, shape = self.source.tensors[self.parts[role]]
        return dtype, tuple(shape)

    def expect(self, role: str, dtypes: tuple[torch.dtype, ...], *shapes: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the part's shape. Raises ValueError unless its shape and dtype are among the given ones. A -1 in a
        shape is any size."""
        dtype, shape = self.info(role)
        if dtype not in dtypes or not any(
            len(shape) == len(s) and all(a in (b, -1) for a, b in zip(s, shape, strict=True)) for s in shapes
        ):
            wanted = " or ".join(str(list(s)).replace("-1", "any") for s in shapes)
            names = ", ".join(dtype_name(d) for d in dtypes)
            raise ValueError(
                f"tensor {self.parts[role]!r} is {str(dtype).removeprefix('torch.')} of shape {list(shape)}; "
                f"the rest of {self.name!r} and quantization_config need {names} of shape {wanted}"
            )
        return shape

    def stored(self, role: str, start: int = 0, stop: int | None = None) -> Tensor:
        return self.source.read_stored(self.parts[role], start, stop)

    def rows(self, role: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a part in `by_rows`, counted through all matrices."""
        if len(self.shape) == 2:
            return self.stored(role, start, stop)
        first, last = self._matrices_of(start, stop)
        before = first * self.shape[-2]
        return self.stored(role, first, last).flatten(0, 1)[start - before : stop - before]

    def _matrices_of(self, start: int, stop: int) -> tuple[int, int]:
        """Range along the first dimension that contains rows [start, stop)."""
        if len(self.shape) == 2:
            return start, stop
        rows = max(1, self.shape[-2])
        return start // rows, -(-stop // rows)

    def columns(self, role: str, start: int, stop: int) -> Tensor:
        """Columns [start, stop) of a part `[H, W]` as rows: `[stop - start, H]`."""
        dtype, (height, width) = self.info(role)
        found = torch.empty(stop - start, height, dtype=dtype)
        step = max(1, PIECE_BYTES // max(1, width * dtype.itemsize))
        for top in range(0, height, step):
            found[:, top : top + step] = self.stored(role, top, min(top + step, height))[:, start:stop].t()
        return found

    def finite(self, role: str, values: Tensor) -> Tensor:
        """Returns `values` in float32. Raises ValueError that names the part if they are not finite."""
        values = values.float()
        if not values.isfinite().all():
            raise ValueError(
                f"tensor {self.parts[role]!r} holds {values[~values.isfinite()][0].item()}, which cannot be a scale: "
                "the checkpoint is damaged"
            )
        return values


class Groups:
    """Assigns K columns to G groups, with a column order in which groups are contiguous."""

    def __init__(self, k: int, count: int, size: int, index: Tensor | None = None):
        """`count` groups of `size` contiguous columns; the last may be shorter. If `index` is given, it holds the group
        `[K]` of each column instead."""
        self.k, self.count, self.size = k, count, size
        self.order: Tensor | None = None
        self.regular = True
        if index is not None:
            order = index.argsort(stable=True)
            self.size = int(index.bincount(minlength=count).max())
            self.regular = torch.equal(index[order], torch.arange(k) // self.size) and count == -(-k // self.size)
            if not torch.equal(order, torch.arange(k)):
                self.order = order
        self.index = index

    def of_columns(self) -> Tensor:
        """int64 `[K]`: the group of each column of the stored codes."""
        return torch.arange(self.k) // self.size if self.index is None else self.index

    def layout_group(self, whole_rows: bool) -> int | None:
        """Group size for a WeightLayout. None means whole rows, if `whole_rows` allows it; 0 means that no layout
        supports these groups."""
        if not self.regular or self.count > 1 and self.size % MIN_GROUP:
            return 0
        if self.count > 1:
            return self.size
        return None if whole_rows else round_up(self.k, MIN_GROUP)


class IntegerMatrix(StoredMatrix):
    """Integers of `bits` bits: `value[n, k] = (u[n, k] - zero[n, g]) * scale[n, g]`. g is the group of column k; u and
    zero are in 0 .. 2^bits - 1. Without zero points, zero is 2^(bits - 1): the codes are symmetric.

    The zero of a layout is 8 for int4 and 0 for int8. Codes of 2 and 3 bits are shifted by their zero points within
    int4's 16 codes. Codes of 5 to 7 bits are shifted within int8's 256. With 4 and 8 bits there is no room, so zero
    points become minima. Either way values are exact."""

    bits: int
    groups: Groups

    def group_index(self, count: int, minimum: int = 0) -> Tensor:
        """The part "groups": int64 `[K]`, the group of each column. Raises ValueError for groups outside `minimum` ..
        `count` - 1."""
        self.expect("groups", (torch.int32, torch.int64), (self.shape[1],))
        index = self.stored("groups").long()
        if index.numel() and (index.min() < minimum or index.max() >= count):
            raise ValueError(
                f"tensor {self.parts['groups']!r} must hold groups in 0..{count - 1}; "
                f"got {index.min().item()}..{index.max().item()}"
            )
        return index

    @abstractmethod
    def codes(self, start: int, stop: int) -> Tensor:
        """The codes u, uint8 `[rows, K]`."""

    def code_pairs(self, start: int, stop: int) -> Tensor | None:
        """Codes of 4 bits as stored: uint8 `[rows, ceil(K / 2)]`, the first of two in the low bits. None if they are
        stored differently."""
        return None

    @abstractmethod
    def scales(self, start: int, stop: int) -> Tensor:
        """Scales, float32 `[rows, G]`, finite."""

    def zeros(self, start: int, stop: int) -> Tensor | None:
        """Zero points, int16 `[rows, G]`, or None for symmetric codes."""
        return None

    def choose_layout(self, symmetric: bool) -> None:
        """Sets `dtype` and `order`, once `bits` and `groups` are known. `symmetric`: True if `zeros` returns None."""
        minima = not symmetric and self.bits in (4, 8)
        group = self.groups.layout_group(whole_rows=not minima)
        if group == 0:
            self.dtype = torch.float32
            return
        self.dtype = WeightLayout("int4" if self.bits <= 4 else "int8", group, minima)
        self.order = self.groups.order

    def read(self, start: int, stop: int) -> QuantizedRows | Tensor:
        scales, zeros = self.scales(start, stop), self.zeros(start, stop)
        middle = 1 << (self.bits - 1)
        layout = self.dtype
        is_plain = self.bits == 4 and isinstance(layout, WeightLayout) and self.order is None
        if is_plain and (pairs := self.code_pairs(start, stop)) is not None:
            mins = None if zeros is None else scales * (middle - zeros)
            return QuantizedRows(layout, pairs, scales, mins, paired_k=self.shape[1])
        codes = self.codes(start, stop)
        if not isinstance(layout, WeightLayout):
            of_columns = self.groups.of_columns()
            return (codes.float() - (middle if zeros is None else zeros[:, of_columns])) * scales[:, of_columns]
        if self.order is not None:
            codes = codes.index_select(1, self.order)
        mins = None
        if layout.has_mins:
            mins = scales * (middle - zeros)
        elif zeros is not None:
            of_columns = zeros.to(torch.uint8).repeat_interleave(self.groups.size, dim=1)[:, : codes.shape[1]]
            codes = codes - of_columns + middle  # modulo 256
        shift = (8 if layout.code == "int4" else 0) - middle
        codes = codes + shift % 256 if shift else codes
        codes = codes if layout.code == "int4" else codes.view(torch.int8)
        return QuantizedRows(layout, codes, scales, mins, self.order)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def unpack(words: Tensor, bits: int) -> Tensor:
    """Unpacks the fields of `bits` bits in integers `[..., W]`, lowest bits first, to uint8 `[..., W * 8 * itemsize /
    bits]`.

    Fields of 3, 5, 6 and 7 bits may cross words. The words must hold a whole number of periods."""
    period = bits // math.gcd(bits, 8)  # number of bytes after which fields begin at a byte again
    packed = as_bytes(words).unflatten(-1, (-1, period))
    count = 8 * period // bits
    if bits == 8:
        return packed.flatten(-2)
    if bits == 4:  # both fields of a byte at once, in a third of the time
        pairs = packed.flatten(-2).to(torch.int16)
        return (pairs << 4).bitwise_or_(pairs).bitwise_and_(0x0F0F).view(torch.uint8)
    fields = packed.new_empty(*packed.shape[:-1], count)
    for i in range(count):
        byte, shift = divmod(i * bits, 8)
        field = packed[..., byte] >> shift
        if shift + bits > 8:
            field |= packed[..., byte + 1] << (8 - shift)
        fields[..., i] = field & ((1 << bits) - 1)
    return fields.flatten(-2)


def as_bytes(values: Tensor) -> Tensor:
    """The bytes of `[..., W]`, little endian, as uint8 `[..., W * itemsize]`."""
    # torch calls a dimension of size 1 contiguous for any stride.
    if not values.is_contiguous() or values.stride(-1) != 1:
        values = values.clone(memory_format=torch.contiguous_format)
    return values.view(torch.uint8)
