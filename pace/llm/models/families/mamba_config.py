"""Common parts of families with Mamba-2 layers: fields of their configs, and the layer itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pace.llm.layers import Convolution, Gate, GatedNorm, Linear, Mamba, Rates, Vectors
from pace.llm.models.layer_types import FULL, LINEAR, layer_types
from pace.llm.models.model_config import MAX_COUNT, MAX_KERNEL, check_divides, count, declared, flag

OLD_KINDS = {"mamba": LINEAR, "attention": FULL}
"""Kinds of layers in files of transformers 4 -> kinds in those of transformers 5."""


def hybrid_layer_types(*kinds: str) -> Any:
    """A field with the kind of each layer, from `kinds` or by their old names, or null."""
    read = layer_types(kinds).metadata["read"]

    def read_old(value: Any) -> tuple[str, ...] | None:
        if isinstance(value, list):
            value = [OLD_KINDS.get(item, item) if isinstance(item, str) else item for item in value]
        return read(value)

    return declared(None, read_old)


def width_or_auto() -> Any:
    """An integer from 1 on; "auto" or null is None."""
    read = count(1).metadata["read"]

    def read_auto(value: Any) -> int | None:
        if value in ("auto", None):
            return None
        try:
            return read(value)
        except ValueError:
            raise ValueError(f'an integer in 1..{MAX_COUNT} or "auto"') from None

    return declared(None, read_auto)


def step_limits() -> Any:
    """Two numbers: the least and the largest step, which may be infinite."""

    def read(value: Any) -> tuple[float, float]:
        numbers = [_number(item) for item in value] if isinstance(value, list) else []
        if len(numbers) != 2 or not 0 <= numbers[0] <= numbers[1]:
            raise ValueError("two numbers low and high with 0 <= low <= high, such as [0.0, Infinity]")
        return numbers[0], numbers[1]

    return declared((0.0, math.inf), read)


def _number(value: Any) -> float:
    """A number in the spelling of transformers 4 or 5; NaN for anything else."""
    if value == {"__float__": "Infinity"}:
        return math.inf
    return float(value) if type(value) in (int, float) else math.nan


@dataclass(frozen=True, kw_only=True)
class MambaForm:
    """The sizes and options of a Mamba-2 layer."""

    hidden: int
    """Elements of an input."""
    heads: int
    head_dim: int
    groups: int
    """Groups of heads with the same keys and queries."""
    state_dim: int
    kernel: int
    eps: float
    bias: bool
    """True if both products have a bias."""
    conv_bias: bool
    step_limits: tuple[float, float]

    @property
    def inner(self) -> int:
        """Elements of all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return self.inner + 2 * self.groups * self.state_dim


def make_mamba(name: str, form: MambaForm, norm: GatedNorm | Gate | None = None) -> Mamba:
    """Makes a layer whose tensors are below `name`. `norm` is by default that of `x * silu(z)`, for each group of
    heads. Steps are quantised with the other rows of `in_proj`, as in published files and in those of llama.cpp."""
    return Mamba(
        Linear({f"{name}.in_proj": form.inner + form.channels + form.heads}, form.hidden, form.bias),
        Convolution({f"{name}.conv1d": form.channels}, form.kernel, form.conv_bias, "silu"),
        Rates({f"{name}.A_log": form.heads}),
        Vectors({f"{name}.dt_bias": form.heads}),
        Vectors({f"{name}.D": form.heads}),
        norm or GatedNorm(f"{name}.norm", form.inner, form.eps, form.groups, norm_first=False),
        Linear({f"{name}.out_proj": form.hidden}, form.inner, form.bias),
        form.heads,
        form.head_dim,
        form.groups,
        form.state_dim,
        form.step_limits,
    )


@dataclass(frozen=True, kw_only=True)
class MambaConfig:
    """Fields about Mamba-2 layers, combined with the config of the family's attention."""

    mamba_n_heads: int = count(128)
    mamba_d_head: int | None = width_or_auto()
    mamba_n_groups: int = count(1)
    mamba_d_state: int = count(256)
    mamba_d_conv: int = count(4, MAX_KERNEL)
    mamba_expand: int = count(2)
    mamba_conv_bias: bool = flag(True)
    mamba_proj_bias: bool = flag(False)
    time_step_limit: tuple[float, float] = step_limits()

    @property
    def mamba_inner(self) -> int:
        """Elements of all heads of a Mamba-2 layer."""
        return self.mamba_expand * self.hidden_size

    @property
    def mamba(self) -> MambaForm:
        """The form of the Mamba-2 layers."""
        return MambaForm(
            hidden=self.hidden_size,
            heads=self.mamba_n_heads,
            head_dim=self.mamba_d_head,
            groups=self.mamba_n_groups,
            state_dim=self.mamba_d_state,
            kernel=self.mamba_d_conv,
            eps=self.rms_norm_eps,
            bias=self.mamba_proj_bias,
            conv_bias=self.mamba_conv_bias,
            step_limits=self.time_step_limit,
        )

    def check(self) -> None:
        super().check()
        check_divides(self, "mamba_n_groups", "mamba_n_heads")
        if self.mamba_inner != self.mamba_n_heads * self.head_dim_of_mamba:
            raise ValueError(
                f"config.json: the heads of Mamba must have {self.mamba_inner} elements together; got mamba_n_heads = "
                f"{self.mamba_n_heads} and mamba_d_head = {self.mamba_d_head or 'auto'}"
            )
        if self.hidden_act != "silu":
            raise NotImplementedError(
                f"config.json: hidden_act = {self.hidden_act!r} is not implemented for Mamba layers; implemented: silu"
            )

    @property
    def head_dim_of_mamba(self) -> int:
        return self.mamba_d_head or self.mamba_inner // self.mamba_n_heads

    def derived(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return super().derived(fields) | {"mamba_d_head": self.head_dim_of_mamba}
