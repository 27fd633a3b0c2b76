"""Quantisation settings that callers may give, and the errors for mistakes."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from pace.quant import FORMATS, FP4, FP8, NF4, Int4, Int8, QuantizationConfig, read_format, read_quantization

MODULES = {
    "model.embed_tokens": "embedding",
    "model.layers.0.self_attn.q_proj": "format",
    "model.layers.0.mlp.down_proj": "format",
    "model.layers.1.self_attn.q_proj": "format",
    "model.layers.1.mlp.down_proj": "format",
    "lm_head": "lm_head",
}


def formats(config: QuantizationConfig, tied: bool = False) -> list:
    modules = {name: kind for name, kind in MODULES.items() if not (tied and name == "lm_head")}
    return list(config.for_modules(modules, tied).values())


@pytest.mark.parametrize("name", FORMATS)
def test_embedding_and_head_are_stored_in_more_bits(name):
    config, bits = QuantizationConfig(name), FORMATS[name]().bits_per_weight()
    small = read_format("q6_k") if name.endswith("_k") or bits < 2.5 else Int8()
    other = small if bits < 6.5 else FORMATS[name]()
    assert formats(config) == [other, *[FORMATS[name]()] * 4, other]
    assert formats(config, tied=True) == [other, *[FORMATS[name]()] * 4]


def test_choices_by_pattern_and_the_last_one_counts():
    config = QuantizationConfig(
        "int4",
        group=32,
        lm_head={"format": "int4", "group": 128},
        embedding=None,
        overrides={"*.down_proj": "int8", "model.layers.1.*": None},
    )
    assert formats(config) == [None, Int4(32), Int8(), None, None, Int4(128)]
    assert formats(QuantizationConfig("int8", overrides={"*": None, "lm_head": FP8()})) == [None] * 5 + [FP8()]


def test_one_matrix_for_both_takes_what_is_said_of_either():
    for said in (
        {"lm_head": None},
        {"embedding": None},
        {"overrides": {"lm_head": None}},
        {"overrides": {"*.embed_tokens": None}},
        {"lm_head": None, "embedding": None},
    ):
        assert formats(QuantizationConfig("int8", **said), tied=True)[0] is None
    with pytest.raises(
        ValueError, match="one matrix, which cannot have int4 for model.embed_tokens and floats for lm_head"
    ):
        formats(QuantizationConfig("int8", embedding="int4", lm_head=None), tied=True)


@pytest.mark.parametrize(
    "config",
    [
        QuantizationConfig(),
        QuantizationConfig("nf4", double_quantization=True, lm_head=None),
        QuantizationConfig(
            "int4",
            symmetric=False,
            embedding="int4",
            overrides={"*.q_proj": {"format": "int8", "group": 32}, "*.k_proj": None},
        ),
    ],
    ids=str,
)
def test_a_config_is_a_dict_of_its_arguments(config):
    assert read_quantization(config.to_dict()) == config
    assert config != QuantizationConfig("fp8")


def test_synonyms():
    assert read_quantization(None) is None
    assert (
        read_quantization("int4")
        == QuantizationConfig("int4")
        == read_quantization(Int4())
        == read_quantization({"format": "int4"})
    )
    assert read_quantization(None, load_in_4bit=True) == QuantizationConfig("nf4")
    assert read_quantization(None, load_in_8bit=True) == QuantizationConfig("int8")


def bitsandbytes(**fields):
    """A config with the fields of transformers' own, including those that have no effect."""
    everything = {
        "quant_method": "bitsandbytes", "load_in_8bit": False, "load_in_4bit": False, "llm_int8_threshold": 6.0,
        "llm_int8_skip_modules": None, "llm_int8_enable_fp32_cpu_offload": False, "llm_int8_has_fp16_weight": False,
        "bnb_4bit_compute_dtype": "float32", "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False,
        "bnb_4bit_quant_storage": "uint8",
    } | fields  # fmt: skip
    return SimpleNamespace(**everything, to_dict=lambda: dict(everything))


@pytest.mark.parametrize("form", [lambda config: config, lambda config: config.to_dict()], ids=["object", "dict"])
def test_bitsandbytes_configs(form):
    assert read_quantization(form(bitsandbytes(load_in_8bit=True))) == QuantizationConfig("int8")
    assert read_quantization(form(bitsandbytes(load_in_4bit=True))).format == FP4()
    nested = read_quantization(
        form(
            bitsandbytes(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                llm_int8_skip_modules=["down_proj", "lm_head"],
            )
        )
    )
    assert formats(nested) == [Int8(), NF4(double_quantization=True), None, NF4(double_quantization=True), None, None]


def test_the_config_of_transformers_itself():
    transformers = pytest.importorskip("transformers")
    config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    assert read_quantization(config) == read_quantization(config.to_dict()) == QuantizationConfig("nf4")


@pytest.mark.parametrize(
    ("make", "error", "told"),
    [
        (lambda: read_format("int5"), ValueError, "did you mean 'int8'? Known: int8, int4"),
        (lambda: read_format(4), TypeError, "got 4"),
        (lambda: read_format("int4", grup=32), TypeError, "int4 has no option 'grup'; did you mean 'group'?"),
        (lambda: read_format("zzz"), ValueError, "no format 'zzz'. Known: int8, int4"),
        (lambda: read_format("mxfp4", group=64), TypeError, "mxfp4 has no option 'group'. It has none"),
        (lambda: read_format("int4", group=24), ValueError, "multiple of 16"),
        (lambda: read_format("int4", group="64"), TypeError, "got '64'"),
        (lambda: read_format("int4", group=True), TypeError, "got True"),
        (lambda: read_format("int4", symmetric=0), TypeError, "symmetric must be True or False"),
        (lambda: read_format("int4", group=None, symmetric=False), ValueError, "symmetric=False needs a group size"),
        (lambda: read_format(Int4(), group=32), TypeError, "to set group"),
        (lambda: QuantizationConfig("int8", lm_head="nf5"), ValueError, "lm_head: there is no format 'nf5'"),
        (lambda: QuantizationConfig("iq2_xs"), ValueError, "iq2_xs exists only in GGUF files"),
        (lambda: QuantizationConfig("int8", overrides=["*.down_proj"]), TypeError, "a dict of module patterns"),
        (lambda: QuantizationConfig("int8", overrides={"*.down_proj": 8}), TypeError, "overrides['*.down_proj']: "),
        (lambda: formats(QuantizationConfig("int8", overrides={"*.down": None})), ValueError,
         "no module matches '*.down'; did you mean '*.down_proj'?"),
        (lambda: formats(QuantizationConfig("int8", overrides={"layers.0.zzz": None})), ValueError,
         "the last parts embed_tokens, q_proj, down_proj, lm_head"),
        (lambda: read_quantization(4), TypeError, "the name of a format (int8, int4"),
        (lambda: read_quantization("int8", load_in_8bit=True), ValueError, "quantization='int8' and load_in_8bit both"),
        (lambda: read_quantization(None, True, True), ValueError, "load_in_4bit and load_in_8bit both"),
        (lambda: read_quantization(None, load_in_4bit=1), TypeError, "load_in_4bit must be True or False"),
        (lambda: read_quantization({"load_in_4bit": False}), ValueError, "this one sets neither"),
        (lambda: read_quantization({"load_in_4bit": True, "bnb_4bit_quant_type": "int4"}), ValueError, "'nf4' or"),
        (lambda: read_quantization({"load_in_8bit": True, "llm_int8_has_fp16_weight": True}), ValueError, "float16"),
        (lambda: read_quantization({"load_in_8bit": True, "bits": 8}), ValueError, "no field 'bits'"),
    ],
)  # fmt: skip
def test_mistakes(make, error, told):
    with pytest.raises(error, match=re.escape(told)):
        make()
