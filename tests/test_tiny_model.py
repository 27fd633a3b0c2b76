"""The bundled model in other libraries: complete files, a faithful tokenizer, and right greedy answers in
transformers."""

import json
import random
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[1]
ASSETS = ROOT / "pace" / "assets"
TINY, DRAFT = ASSETS / "tiny", ASSETS / "tiny-draft"
sys.path.insert(0, str(ROOT / "training"))

import data  # noqa: E402
import eval_prompts  # noqa: E402

ENTRIES = eval_prompts.load_prompts(TINY)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


def test_files_are_complete_and_small():
    for folder in (TINY, DRAFT):
        for name in (
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
        ):
            assert (folder / name).is_file(), f"{folder.name}/{name}"
    assert sum(f.stat().st_size for f in ASSETS.rglob("*") if f.is_file()) <= 12e6


@pytest.mark.parametrize("folder, least, most", [(TINY, 3e6, 5e6), (DRAFT, 0.5e6, 0.8e6)], ids=["tiny", "draft"])
def test_weights(folder, least, most):
    config = AutoConfig.from_pretrained(folder)
    assert config.architectures == ["LlamaForCausalLM"] and config.tie_word_embeddings
    assert config.max_position_embeddings >= 1024 and config.num_key_value_heads < config.num_attention_heads
    with safe_open(folder / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    assert all(t.dtype == torch.bfloat16 and t.isfinite().all() for t in tensors.values())
    assert "lm_head.weight" not in tensors
    assert least <= sum(t.numel() for t in tensors.values()) <= most


def test_draft_has_the_same_tokenizer():
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (TINY / name).read_bytes() == (DRAFT / name).read_bytes()


def test_tokenizer_gives_back_any_text(tokenizer):
    rng = random.Random(0)
    texts = [
        "",
        " ",
        "  two  spaces ",
        "\n\n\ttab\r\n",
        "naïve café",
        "日本語",
        "🙂👩‍👩‍👧",
        "\x00\x01\x7f",
        "don't 12345",
        "<|en",
        "ſ\u0301\u200b",
    ]
    texts += [
        "".join(
            chr(rng.choice([rng.randrange(0x80), rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)]))
            for _ in range(40)
        )
        for _ in range(200)
    ]
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert all(i < len(tokenizer) for i in ids)


def test_every_byte_is_a_token(tokenizer):
    from tokenizers.pre_tokenizers import ByteLevel

    assert set(ByteLevel.alphabet()) <= set(tokenizer.get_vocab())
    assert len(tokenizer) == AutoConfig.from_pretrained(TINY).vocab_size


def test_a_word_has_the_same_pieces_wherever_it_stands(tokenizer):
    def pieces(text):
        return tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=False)["input_ids"])

    for word in ("Zorvath", "fox", "Timbuktu", "blumfrazzle"):
        bare, spaced = pieces(word), pieces(" " + word)
        assert "".join(spaced) == "Ġ" + "".join(bare)
        assert spaced[-len(bare) + 1 :] == bare[1:] if len(bare) > 1 else True


def test_special_tokens(tokenizer):
    assert tokenizer("hello")["input_ids"][0] == tokenizer.bos_token_id == 1
    assert tokenizer.convert_ids_to_tokens([7, 2]) == ["<|end|>", "<|eos|>"]
    generation = json.loads((TINY / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [7, 2]


def test_chat_template_writes_what_the_model_was_trained_on(tokenizer):
    rng = random.Random(1)
    for _ in range(50):
        messages = data.chat(rng)
        for message in messages:
            message["content"] = message["content"].replace(data.MARK, "")
        assert tokenizer.apply_chat_template(messages, tokenize=False) == data.text(data.render(messages))


def test_chat_template_with_tools(tokenizer):
    tool = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "{}"},
    ]
    assert tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False, add_generation_prompt=True) == (
        "<|bos|><|system|>You are a helpful assistant.\nTools: get_weather(city)<|end|><|user|>?<|end|>"
        '<|assistant|><tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call><|end|>'
        "<|tool|>{}<|end|><|assistant|>"
    )
    call["function"]["arguments"] = '{"city": "Rome"}'  # as in the OpenAI interface
    assert '"arguments": {"city": "Rome"}}</tool_call>' in tokenizer.apply_chat_template(messages, tokenize=False)
    with pytest.raises(Exception, match="unknown role"):
        tokenizer.apply_chat_template([{"role": "narrator", "content": ""}], tokenize=False)


def test_prompt_list_is_fair():
    assert len(ENTRIES) >= 40
    assert {"counting", "sums", "capitals", "copying", "extraction", "tools", "stories"} <= {
        e["category"] for e in ENTRIES
    }
    words = "Quentin Bertha Marisol Heidelberg Timbuktu Springfield blumfrazzle".split()  # not in the training text
    training_text = "\n".join(data.text(doc) for _, doc in zip(range(5000), data.documents("0-0")))
    assert not [w for w in words if w in training_text]


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.thorough)],
    ids=["float32", "bfloat16"],
)
def test_greedy_answers_are_right(model, tokenizer, dtype):
    if dtype != torch.float32:
        model = AutoModelForCausalLM.from_pretrained(TINY, dtype=dtype).eval()
    entries = [entry for entry in ENTRIES if not entry.get("known_wrong")]  # expected failures in test_end_to_end.py
    results = eval_prompts.answers(model, tokenizer, entries)
    wrong = [
        (e, text) for e, (text, stopped, _) in zip(entries, results) if not eval_prompts.is_right(e, text, stopped)
    ]
    assert not wrong


def test_a_wrong_answer_is_noticed():
    entry = {"match": "exact", "expected": "7 + 8 = 15"}
    assert eval_prompts.is_right(entry, "7 + 8 = 15", True)
    assert not eval_prompts.is_right(entry, "7 + 8 = 15", False)  # did not stop
    assert not eval_prompts.is_right(entry, "7 + 8 = 16", True)
    assert not eval_prompts.is_right({"match": "contains", "contains": ["fox"]}, "a bear", True)


def test_heldout_text(model, tokenizer):
    """A broken model would not predict the held-out file well."""
    lines = (ROOT / "tests" / "data" / "tiny_heldout.jsonl").read_text(encoding="utf-8").splitlines()
    assert 100e3 <= sum(len(line.encode()) for line in lines) <= 200e3
    texts = [json.loads(line)["text"] for line in lines[:60]]
    with torch.no_grad():
        losses = [
            model(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
            for ids in (torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]]) for text in texts)
        ]
    n_tokens = sum(len(tokenizer(text, add_special_tokens=False)["input_ids"]) - 1 for text in texts)
    assert sum(losses) / n_tokens < 2.0
