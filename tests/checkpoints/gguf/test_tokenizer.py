"""Tokenizers from GGUF files give the ids, texts and chat templates of the tokenizers that the files were made from."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")
pytest.importorskip("transformers")

from pace.assets import TINY  # noqa: E402
from pace.checkpoints.gguf.tokenizer import PRE_TOKENIZERS  # noqa: E402
from pace.tokenizer.loading import load_tokenizer  # noqa: E402
from tests.checkpoints.gguf.files import add_tokenizer  # noqa: E402
from tests.llm.text.tokenizer_zoo import ZOO, byte_level, sentencepiece  # noqa: E402

HELD_OUT = [
    json.loads(line)
    for line in (Path(__file__).parents[2] / "data" / "tiny_heldout.jsonl").read_text(encoding="utf-8").splitlines()
]
STRANGE = [
    "", " ", "  two  spaces ", "\n\n\ttab\r\n", "naïve café", "日本語", "🙂👩‍👩‍👧", "\x00\x01\x7f",
    "don't we'll THEY'RE 12345 3.14", "'the 'tis", "<|en", "e\u0301\u200b", "<|user|>Hello<|end|> <|assistant|> x",
    "<s>a</s> b<unk>c", "a▁b ▁ c", "trailing   ", "x\n\n\n  y\t", "<0x41><0xE6>",
]  # fmt: skip


def file_with(path: Path, *add, architecture: str = "llama") -> Path:
    """A file with metadata only."""
    writer = gguf.GGUFWriter(path, architecture)
    for more in add:
        more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return path


def as_file(path: Path, tokenizer, pre=None, *add, **options):
    return load_tokenizer(file_with(path, lambda writer: add_tokenizer(writer, tokenizer, pre), *add, **options))


def put(name, value, kind):
    """Sets the key `tokenizer.{name}`."""
    key = f"tokenizer.{name}"
    return lambda writer: (writer.kv_data[0].pop(key, None), getattr(writer, f"add_{kind}")(key, value))


def assert_same(found, expected, texts):
    for text in texts:
        ids = expected(text)["input_ids"]
        assert found(text)["input_ids"] == ids, text
        for skip in (True, False):
            assert found.decode(ids, skip_special_tokens=skip) == expected.decode(ids, skip_special_tokens=skip), text
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"):
        assert getattr(found, name) == getattr(expected, name)
    assert set(found.all_special_ids) == set(expected.all_special_ids) and len(found) == len(expected)


def random_texts(count):
    rng = random.Random(0)
    return [
        "".join(rng.choice("abcXYZ  ''..,,\n\t0123456789éß日本🙂$+=<>_-/") for _ in range(30)) for _ in range(count)
    ]


def test_the_bundled_models(tmp_path):
    expected = load_tokenizer(TINY)
    found = as_file(tmp_path / "t.gguf", expected, "gpt-2")
    texts = [entry["text"] for entry in HELD_OUT]
    assert len(texts) > 20
    # GGUF has no name for the bundled tokenizer's rule: GPT-2's, except that only 's is cut off. The rules differ if
    # another contraction begins a word.
    assert_same(
        found,
        expected,
        [text for text in texts + STRANGE + random_texts(50) if not re.search(r"'(t|re|ve|m|ll|d)\w", text)],
    )
    assert found.chat_template == expected.chat_template
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    for options in ({"tokenize": False}, {"tokenize": True, "return_dict": False}):
        assert found.apply_chat_template(chat, add_generation_prompt=True, **options) == expected.apply_chat_template(
            chat, add_generation_prompt=True, **options
        )


@pytest.mark.parametrize("kind", ZOO)
def test_of_both_kinds(tmp_path, kind):
    expected = ZOO[kind]()
    assert_same(
        as_file(tmp_path / "t.gguf", expected, "gpt-2" if kind == "byte_level" else None),
        expected,
        STRANGE + random_texts(50),
    )


def test_a_whole_tokenizer_json_in_the_file_is_taken(tmp_path):
    """tokenizer.huggingface.json of the GGUF specification: with it, a rule needs no name."""
    expected = load_tokenizer(TINY)
    whole = lambda writer: writer.add_string(
        "tokenizer.huggingface.json", (TINY / "tokenizer.json").read_text(encoding="utf-8")
    )
    found = as_file(tmp_path / "t.gguf", expected, "unheard-of", whole)
    assert_same(found, expected, STRANGE + random_texts(50))


PIECES = {
    # I'd pay $12345 for the HTMLPage, e.g. 1.5kg\n\n  now!
    "default": "I|'|d| pay| |$|123|45| for| the| HTMLPage|,| e|.|g|.| |1|.|5|kg|\n\n | now|!",
    "falcon": "I|'|d| pay| |$|123|45| for| the| HTMLPage|,| e|.|g|.| 1|.|5|kg|\n\n | now|!",
    "bloom": "I'd| pay| $12345| for| the| HTMLPage|,| e|.|g|.| 1|.|5kg|\n\n | now|!",
    "gpt-2": "I|'d| pay| $|12345| for| the| HTMLPage|,| e|.|g|.| 1|.|5|kg|\n\n | now|!",
    "modern-bert": "I|'d| pay| $|12345| for| the| HTMLPage|,| e|.|g|.| 1|.|5|kg|\n\n | now|!",
    "smollm": "I|'d| pay| $|1|2|3|4|5| for| the| HTMLPage|,| e|.|g|.| |1|.|5|kg|\n\n | now|!",
    "llama-bpe": "I|'d| pay| $|123|45| for| the| HTMLPage|,| e|.g|.| |1|.|5|kg|\n\n| | now|!",
    "dbrx": "I|'d| pay| $|123|45| for| the| HTMLPage|,| e|.g|.| |1|.|5|kg|\n\n| | now|!",
    "qwen2": "I|'d| pay| $|1|2|3|4|5| for| the| HTMLPage|,| e|.g|.| |1|.|5|kg|\n\n| | now|!",
    "qwen35": "I|'d| pay| $|1|2|3|4|5| for| the| HTMLPage|,| e|.g|.| |1|.|5|kg|\n\n| | now|!",
    "hunyuan": "I|'d| pay| $|1|2|3|4|5| for| the| HTMLPage|,| e|.g|.| |1|.|5|kg|\n\n| | now|!",
    "jais-2": "I|'d| pay| $|123|45| for| the| HTMLPage|,| e|.g|.| |1|.|5|kg|\n\n| | now|!",
    "seed-coder": "I|'d| pay| $|1|2|3|4|5| for| the| HTMLPage|,| e|.g|.| |1|.|5|kg|\n\n| | now|!",
    "youtu": "I'd| pay| $|1|2|3|4|5| for| the| HTMLPage|,| e|.g|.| |1|.|5|kg|\n\n| | now|!",
    "hunyuan-dense": "I|'d| pay| $|123|45| for| the| HTMLPage|,| e|.g|.| |1|.|5|kg|\n\n| | now|!",
    "glm4": "I|'d| pay| $|123|45| for| the| HTMLPage|,| e|.g|.| |1|.|5|kg|\n\n| | now|!",
    "laguna": "I|'d| pay| $|1|2|3|4|5| for| the| HTMLPage|,| e|.g|.| |1|.|5|kg|\n\n| | now|!",
    "bailingmoe2": "I|'d| pay| $|1|2|3|4|5| for| the| HTMLPage|,| e|.g|.| |1|.|5|kg|\n\n| | now|!",
    "exaone-moe": "I|'d| pay| $|1|2|3|4|5| for the HTMLPage|,| e|.g|.| |1|.|5|kg|\n\n| | now|!",
    "kimi-k2": "I'd| pay| $|123|45| for| the| HTMLPage|,| e|.g|.| |1|.|5|kg|\n\n| | now|!",
    "afmoe": "I|'d| pay| $|12|345| for| the| HTMLPage|,| e|.g|.| |1|.|5|kg|\n\n| | now|!",
    "cohere2moe": "I'd| pay| $|12|345| for| the| HTMLPage|,| e|.g|.| |1|.|5|kg|\n\n| | now|!",
    "deepseek-llm": "I|'|d| pay| $|1|2|3|4|5| for| the| HTMLPage|,| e|.|g|.| |1|.|5|kg|\n|\n| | now|!",
    "deepseek-coder": "I|'|d| pay| $|1|2|3|4|5| for| the| HTMLPage|,| e|.|g|.| |1|.|5|kg|\n|\n| | now|!",
    "tekken": "I|'d| pay| $|1|2|3|4|5| for| the| HTMLPage|,| e|.g|.| |1|.|5|kg|\n\n| | now|!",
    "gpt-4o": "I'd| pay| $|123|45| for| the| HTMLPage|,| e|.g|.| |1|.|5|kg|\n\n| | now|!",
}
"""Pieces into which each rule cuts the text. llama-cpp-python 0.3.36 gives the same tokens for the texts of this file:
checked by hand, except for Hunyuan's and DeepSeek's."""


@pytest.mark.parametrize("name", PIECES)
def test_how_texts_are_cut(tmp_path, name):
    tokenizer = as_file(tmp_path / "t.gguf", byte_level(), name)
    before = tokenizer.backend_tokenizer.pre_tokenizer
    pieces = [
        piece.replace("Ġ", " ").replace("Ċ", "\n")
        for piece, _ in before.pre_tokenize_str("I'd pay $12345 for the HTMLPage, e.g. 1.5kg\n\n  now!")
    ]
    assert "|".join(pieces) == PIECES[name]
    assert all(cut in [PRE_TOKENIZERS[name] for name in PIECES] for cut in PRE_TOKENIZERS.values()), (
        "every rule is in this test"
    )
    composed = tokenizer.backend_tokenizer.normalizer
    assert (composed.normalize_str("e\u0301") if composed else "e\u0301") == (
        "é" if name in ("qwen2", "qwen35", "modern-bert") else "e\u0301"
    )


def test_marks_of_scripts_are_letters_for_qwen35(tmp_path):
    """Devanagari has vowels that are marks. In Qwen2's rule, each begins a piece."""
    cuts = {"qwen2": ["नमस", "्त", "े"], "qwen35": ["नमस्ते"]}
    for name, pieces in cuts.items():
        before = as_file(tmp_path / "t.gguf", byte_level(), name).backend_tokenizer.pre_tokenizer
        found = before.pre_tokenize_str("नमस्ते")
        assert ["नमस्ते"[start:stop] for _, (start, stop) in found] == pieces


CUTS = {
    "kimi-k2": ("Don'T x漢字ab 世界 Éa", "Don'T| x|漢字|ab| |世界| Éa"),
    "afmoe": ("1234567 ok漢字한국 é!", "1|234|567| ok|漢字한국| é|!"),
    "cohere2moe": ("1234567 x1234 12a", "1|234|567| x|1|234| |12|a"),
    "laguna": ("a \n\n b", "a| |\n\n| b"),
    "bailingmoe2": ("It'S a\n \n b", "It|'S| a|\n \n| b"),
    "exaone-moe": ("a bc d,/\n x", "a bc d|,/\n| x"),
}
"""Texts and their pieces, in which these rules differ from others."""


@pytest.mark.parametrize("name", CUTS)
def test_what_single_rules_cut_otherwise(tmp_path, name):
    text, pieces = CUTS[name]
    before = as_file(tmp_path / "t.gguf", byte_level(), name).backend_tokenizer.pre_tokenizer
    assert "|".join(text[start:stop] for _, (start, stop) in before.pre_tokenize_str(text)) == pieces


def test_deepseeks_first_rule_knows_scripts(tmp_path):
    before = as_file(tmp_path / "t.gguf", byte_level(), "deepseek-llm").backend_tokenizer.pre_tokenizer
    text = "Привет, 世界！ 𝐀b 한국 ok "
    pieces = [text[start:stop] for _, (start, stop) in before.pre_tokenize_str(text)]
    assert pieces == ["Привет", ",", " ", "世界", "！", " 𝐀", "b", " ", "한국", " ok", " "]


def test_what_comes_before_and_after(tmp_path):
    def ids(pre, *add, tokenizer=byte_level):
        made = lambda writer: (
            add_tokenizer(writer, tokenizer(), pre),
            writer.kv_data[0].pop("tokenizer.ggml.add_bos_token"),
            writer.kv_data[0].pop("tokenizer.ggml.add_eos_token"),
        )
        found = load_tokenizer(file_with(tmp_path / "t.gguf", made, *add))
        inside = found("ab", add_special_tokens=False)["input_ids"]
        whole = found("ab")["input_ids"]
        place = next(place for place in range(len(whole)) if whole[place : place + len(inside)] == inside)
        pair = found("ab", "ab")["input_ids"]
        assert pair == whole * 2
        return whole[:place], whole[place + len(inside) :]

    bos, with_bos, with_eos = (
        put("ggml.bos_token_id", 0, "uint32"),
        put("ggml.add_bos_token", True, "bool"),
        put("ggml.add_eos_token", True, "bool"),
    )
    assert ids("gpt-2", bos) == ([], [])
    assert ids("gpt-2", bos, with_bos) == ([0], []) and ids("gpt-2", with_bos) == ([], []), "there is none"
    assert ids("gpt-2", bos, with_eos) == ([], [1]) and ids("qwen2", bos, with_bos, with_eos) == ([0], [1])
    assert ids("llama-bpe", bos) == ids("tekken", bos) == ([0], []), "where the file does not say, as llama.cpp"
    assert ids("llama-bpe", bos, put("ggml.add_bos_token", False, "bool")) == ([], [])
    assert ids(None, tokenizer=sentencepiece) == ([1], [])


def test_words_that_are_tokens_are_taken_whole(tmp_path):
    """Llama 3's rule takes them whole. In Qwen's rule only the merges decide."""

    def drop_merge(writer):
        merges = writer.kv_data[0]["tokenizer.ggml.merges"]
        merges.value = [merge for merge in merges.value if merge.replace(" ", "") != "don"]

    assert "don" in byte_level().get_vocab()
    llama, qwen = (as_file(tmp_path / f"{pre}.gguf", byte_level(), pre, drop_merge) for pre in ("llama-bpe", "qwen2"))
    assert llama.tokenize("don") == ["don"] and qwen.tokenize("don") == ["d", "on"]


def test_types_of_tokens(tmp_path):
    """Control tokens are special. User-defined tokens are found in texts and shown. Unused tokens are neither."""
    kinds = gguf.TokenType

    def change(writer):
        types = writer.kv_data[0]["tokenizer.ggml.token_type"]
        tokens = writer.kv_data[0]["tokenizer.ggml.tokens"].value
        tokens[-3:] = ["<|control|>", "<tool>", "[unused]"]
        types.value[-3:] = [kinds.CONTROL, kinds.USER_DEFINED, kinds.UNUSED]
        writer.kv_data[0]["tokenizer.ggml.merges"].value = [
            merge
            for merge in writer.kv_data[0]["tokenizer.ggml.merges"].value
            if merge.replace(" ", "") in tokens and set(merge.split(" ")) <= set(tokens)
        ]

    found = as_file(tmp_path / "t.gguf", byte_level(), "gpt-2", change)
    last = len(found) - 1
    ids = found("a<|control|>b<tool>[unused]")["input_ids"]
    assert last - 2 in ids and last - 1 in ids and last not in ids
    assert found.decode(ids, skip_special_tokens=True) == "ab<tool>[unused]"
    assert last - 2 in found.all_special_ids and last - 1 not in found.all_special_ids


def test_phi3_takes_the_spaces_after_its_special_tokens(tmp_path):
    def control(writer):
        tokens, types = (writer.kv_data[0][f"tokenizer.ggml.{key}"].value for key in ("tokens", "token_type"))
        tokens[-1], types[-1] = "<|user|>", gguf.TokenType.CONTROL

    phi, llama = (
        as_file(tmp_path / f"{architecture}.gguf", sentencepiece(), None, control, architecture=architecture)
        for architecture in ("phi3", "llama")
    )
    assert (
        phi("<|user|>  a")["input_ids"] == phi("<|user|>a")["input_ids"]
        and llama("<|user|>  a")["input_ids"] != llama("<|user|>a")["input_ids"]
    )
    assert phi("<s>  a")["input_ids"] == llama("<s>  a")["input_ids"]


def test_prefix_of_a_space(tmp_path):
    with_prefix, without = (
        as_file(tmp_path / f"{wanted}.gguf", sentencepiece(), None, put("ggml.add_space_prefix", wanted, "bool"))
        for wanted in (True, False)
    )
    assert with_prefix.tokenize("the")[0].startswith("▁") and not without.tokenize("the")[0].startswith("▁")
    for tokenizer in (with_prefix, without):
        assert tokenizer.decode(tokenizer(" the  end", add_special_tokens=False)["input_ids"]) == " the  end"


def test_several_chat_templates(tmp_path):
    templates = [
        {"name": "default", "template": "A{{ messages[0].content }}"},
        {"name": "tool_use", "template": "B{{ messages[0].content }}"},
    ]
    found = as_file(tmp_path / "t.gguf", byte_level(), "gpt-2", lambda writer: writer.add_chat_template(templates))
    chat = [{"role": "user", "content": "x"}]
    assert (
        found.apply_chat_template(chat, tokenize=False) == "Ax"
        and found.apply_chat_template(chat, tokenize=False, chat_template="tool_use") == "Bx"
    )
    assert as_file(tmp_path / "n.gguf", byte_level(), "gpt-2").chat_template is None


def test_files_without_a_vocabulary(tmp_path):
    path = file_with(tmp_path / "t.gguf", lambda writer: writer.add_tokenizer_model("no_vocab"))
    assert load_tokenizer(path, required=False) is None
    with pytest.raises(FileNotFoundError, match=r"t\.gguf has no tokenizer .*give tokenizer_name_or_path"):
        load_tokenizer(path)


def test_a_tokenizer_of_an_architecture_that_is_not_implemented(tmp_path):
    """`tokenizer_name_or_path` may be any file."""
    assert as_file(tmp_path / "t.gguf", byte_level(), "gpt-2", architecture="gemma3").tokenize(
        "the"
    ) == byte_level().tokenize("the")


@pytest.mark.parametrize(
    ("add", "error", "message"),
    [
        (put("ggml.pre", "unheard-of", "string"), NotImplementedError,
         "pre = 'unheard-of' is not implemented; implemented: default, gpt-2, .*tokenizer_name_or_path"),
        (put("ggml.model", "rwkv", "string"), NotImplementedError, "of type 'rwkv', .*: gpt2, llama, .*bert, t5"),
        (put("ggml.tokens", ["a", "b", "a"], "array"), ValueError, "tokenizer.ggml.tokens has 'a' twice"),
        (put("ggml.tokens", 3, "uint32"), ValueError, "tokenizer.ggml.tokens must be an array of strings; got 3"),
        (put("ggml.merges", ["a bc d"], "array"), ValueError, "ggml.merges has 'a bc d', which must be two tokens"),
        (put("ggml.merges", ["a qqq"], "array"), ValueError, "ggml.merges has 'a qqq', which must be two tokens"),
        (put("ggml.token_type", [1, 1], "array"), ValueError, "must have a type for each of 300 tokens; it has 2"),
        (put("ggml.eos_token_id", 300, "uint32"), ValueError, "eos_token_id must be one of the 300 tokens; got 300"),
        (put("huggingface.json", "{", "string"), ValueError, "cannot make the tokenizer in .* from its metadata"),
        (lambda writer: writer.kv_data[0].pop("tokenizer.ggml.merges"), ValueError, "has no tokenizer.ggml.merges"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path, add, error, message):
    with pytest.raises(error, match=message) as raised:
        as_file(tmp_path / "t.gguf", byte_level(), "gpt-2", add)
    assert "t.gguf" in str(raised.value)


def test_sentencepiece_needs_its_scores(tmp_path):
    for add, message in (
        (lambda writer: writer.kv_data[0].pop("tokenizer.ggml.scores"), "has no tokenizer.ggml.scores"),
        (put("ggml.scores", [1.0], "array"), "a score for each of 360 tokens; it has 1"),
    ):
        with pytest.raises(ValueError, match=message):
            as_file(tmp_path / "t.gguf", sentencepiece(), None, add)
