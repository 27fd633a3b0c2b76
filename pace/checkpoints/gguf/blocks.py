"""Block types of ggml that GGUF files use for matrices, with their numbers."""

from __future__ import annotations

from pace.ops.blocks import BlockType
from pace.ops.weight_layout import GRIDS, SUPER_GROUPS, WeightLayout


def _super(code: str, scale_bits: int, has_mins: bool = False, codebook: str | None = None) -> WeightLayout:
    """Layout of a type with super-blocks. Codes with minima have offset 0."""
    return WeightLayout(code, SUPER_GROUPS[code], has_mins, codebook, 0 if has_mins else None, scale_bits)


def _grid(code: str) -> WeightLayout:
    return WeightLayout(code, GRIDS[code].group, scale_bits=GRIDS[code].number_bits)


TERNARY = WeightLayout("int2", 256, offset=1)
NVFP4 = BlockType(40, "NVFP4", 64, 36, WeightLayout("int4", 16, codebook="mxfp4"))
Q2_0 = BlockType(42, "Q2_0", 64, 18, WeightLayout("int2", 64, offset=1))

_TYPES = (
    BlockType(2, "Q4_0", 32, 18, WeightLayout("int4", 32)),
    BlockType(3, "Q4_1", 32, 20, WeightLayout("int4", 32, has_mins=True, offset=0)),
    BlockType(6, "Q5_0", 32, 22, WeightLayout("int5", 32)),
    BlockType(7, "Q5_1", 32, 24, WeightLayout("int5", 32, has_mins=True, offset=0)),
    BlockType(8, "Q8_0", 32, 34, WeightLayout("int8", 32)),
    BlockType(10, "Q2_K", 256, 84, _super("int2", 4, has_mins=True)),
    BlockType(11, "Q3_K", 256, 110, _super("int3", 6)),
    BlockType(12, "Q4_K", 256, 144, _super("int4", 6, has_mins=True)),
    BlockType(13, "Q5_K", 256, 176, _super("int5", 6, has_mins=True)),
    BlockType(14, "Q6_K", 256, 210, _super("int6", 8)),
    BlockType(16, "IQ2_XXS", 256, 66, _grid("iq2_xxs")),
    BlockType(17, "IQ2_XS", 256, 74, _grid("iq2_xs")),
    BlockType(18, "IQ3_XXS", 256, 98, _grid("iq3_xxs")),
    BlockType(19, "IQ1_S", 256, 50, _grid("iq1_s")),
    BlockType(20, "IQ4_NL", 32, 18, WeightLayout("int4", 32, codebook="iq4_nl")),
    BlockType(21, "IQ3_S", 256, 110, _grid("iq3_s")),
    BlockType(22, "IQ2_S", 256, 82, _grid("iq2_s")),
    BlockType(23, "IQ4_XS", 256, 136, _super("int4", 6, codebook="iq4_nl")),
    BlockType(29, "IQ1_M", 256, 56, _grid("iq1_m")),
    BlockType(34, "TQ1_0", 256, 54, TERNARY),
    BlockType(35, "TQ2_0", 256, 66, TERNARY),
    BlockType(39, "MXFP4", 32, 17, WeightLayout("int4", 32, codebook="mxfp4")),
    NVFP4,
    BlockType(41, "Q1_0", 128, 18, WeightLayout("int1", 128)),
    Q2_0,
)

WIDE_Q2_0 = BlockType(142, "Q2_0 of 128", 128, 34, WeightLayout("int2", 128, offset=1))
"""What PrismML's fork of llama.cpp wrote as type 42 before that type came to ggml. 142 is its number for the kernels.
Their later files with type 142 also need their inputs rotated, and are refused."""

BLOCK_TYPES: dict[int, BlockType] = {type.number: type for type in _TYPES}
"""ggml's type number -> type."""

FILE_TYPES = {
    2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L",
    14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE", 39: "NVFP4", 40: "Q1_0",
    41: "Q2_0",
}  # fmt: skip
"""Names of mixtures of these types, by general.file_type (llama_ftype in include/llama.h of llama.cpp)."""

OTHER_TYPES = {
    9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8",
    36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 142: "PQ2_0", 143: "PTQ1_0",
}  # fmt: skip
"""Names of types that are not implemented."""
