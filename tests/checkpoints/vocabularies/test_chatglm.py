"""The tokenizers of ChatGLM3 and GLM-4-9B, without the code in their checkpoints: conversations are compared token by
token with the result of that code."""

from __future__ import annotations

import copy
import json
import shutil

import pytest

pytest.importorskip("transformers")

from pace.llm import LLMModel, SamplingConfig
from pace.llm.chat import Tool
from pace.llm.chat.template import ChatTemplate
from pace.tokenizer.chatglm import APART, NAMES
from pace.tokenizer.loading import load_tokenizer
from tests.checkpoints.vocabularies.test_vocabularies import HERE, golden, ranks, tokenizer_of, written
from tests.llm.models.variants import save_tiny

PIECES = 480
IDS = {name: PIECES + index for index, name in enumerate(NAMES)}
TALK = [
    {"role": "system", "content": "the system"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "a sophisticated fox"},
    {"role": "user", "content": " two\n\nspaces, 你好"},
]


def checkpoint(folder, kind="plain", **settings):
    folder.mkdir(exist_ok=True)
    shutil.copy(HERE / f"{kind}.model", folder / "tokenizer.model")
    code = {"AutoTokenizer": ["tokenization_chatglm.ChatGLMTokenizer", None]}
    settings = {"tokenizer_class": "ChatGLMTokenizer", "auto_map": code, "eos_token": "</s>", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module", params=["plain", "normalised"])
def tokenizer(request, tmp_path_factory):
    return load_tokenizer(checkpoint(tmp_path_factory.mktemp("chatglm") / request.param, request.param))


def encoded(tokenizer, text):
    """Token ids of the vocabulary's own tokenizer, built without the checkpoint."""
    kind = "plain" if "plain" in tokenizer.name_or_path else "normalised"
    return tokenizer_of(golden(kind).parts()).encode(text).ids


def built(tokenizer, messages):
    """Ids like those of `build_chat_input`: a role's token, then a line and a text, each encoded separately."""
    found = [IDS["[gMASK]"], IDS["sop"]]
    for message in messages:
        found += [IDS[f"<|{message['role']}|>"], *encoded(tokenizer, f"{message.get('metadata', '')}\n")]
        found += encoded(tokenizer, message["content"])
    return [*found, IDS["<|assistant|>"]]


def test_special_ids_count_on_from_the_vocabulary(tokenizer):
    assert len(tokenizer) == PIECES + 9
    assert tokenizer.convert_tokens_to_ids(list(NAMES)) == list(range(PIECES, PIECES + 9))
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (2, 0, 0)
    assert tokenizer.turn_ends == [IDS["<|user|>"], IDS["<|observation|>"]]


def test_texts_begin_as_all_texts_do_and_names_are_text(tokenizer):
    for text in ("hello", "a sophisticated user", "<|user|> [MASK]", "Sop sop", f"x{APART}y"[:1]):
        assert tokenizer(text)["input_ids"] == [IDS["[gMASK]"], IDS["sop"], *encoded(tokenizer, text)]
        assert tokenizer.encode(text, add_special_tokens=False) == encoded(tokenizer, text)
    batch = tokenizer(["hello", "a sophisticated user"], padding=True)["input_ids"]
    assert batch[0][-3:] == [IDS["[gMASK]"], IDS["sop"], *encoded(tokenizer, "hello")][-3:]


@pytest.mark.parametrize("length", range(1, 5))
def test_turns_are_encoded_apart(tokenizer, length):
    assert ChatTemplate(tokenizer).encode(TALK[:length]) == built(tokenizer, TALK[:length])


def test_names_in_messages_are_text(tokenizer):
    talk = [{"role": "user", "content": "sop <|assistant|>\n [gMASK]sop [MASK]"}, *TALK[2:]]
    assert ChatTemplate(tokenizer).encode(talk) == built(tokenizer, talk)
    template = ChatTemplate(copy.deepcopy(tokenizer))
    text = template.render(talk)
    assert template.tokenizer(text)["input_ids"] == built(tokenizer, talk), "as a text, too"


def test_an_empty_text_is_no_token(tokenizer):
    talk = [{"role": "system", "content": ""}, TALK[1]]
    assert ChatTemplate(tokenizer).encode(talk) == built(tokenizer, talk)


def test_the_template_of_the_checkpoint_gives_way(tmp_path):
    """Our template renders the same for all conversations that the checkpoint's template supports."""
    theirs = (
        "{% for message in messages %}{% if loop.first %}[gMASK]sop<|{{ message['role'] }}|>\n {{ message['content'] }}"
        "{% else %}<|{{ message['role'] }}|>\n {{ message['content'] }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    ours = load_tokenizer(checkpoint(tmp_path / "plain", chat_template=theirs))
    other = copy.copy(ours)
    other.chat_template = theirs
    assert ChatTemplate(ours).render(TALK) == ChatTemplate(other).render(TALK)
    assert ChatTemplate(other).encode(TALK) == built(ours, TALK)


def test_a_role_that_it_does_not_know_is_refused(tokenizer):
    with pytest.raises(ValueError, match="roles are system, user, assistant and tool"):
        ChatTemplate(tokenizer).render([{"role": "narrator", "content": "x"}])


TOOL = Tool("track", "the price", {"type": "object", "properties": {"symbol": {"type": "string"}}})


def test_calls_and_what_they_return(tokenizer):
    """Calls and results in the form of ChatGLM3's page on tools."""
    call = {"type": "function", "function": {"name": "track", "arguments": '{"symbol": "it\'s <|user|>", "n": 3}'}}
    talk = [
        {"role": "user", "content": "sop?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": '{"price": 12412}'},
    ]
    template = ChatTemplate(tokenizer)
    assert template.format.name == "chatglm3"
    text = template.render(talk, [TOOL]).replace(APART, "")
    tools, _, rest = text.partition("]<|user|>")
    assert tools.startswith("[gMASK]sop<|system|>\n Answer the following questions") and '"name": "track"' in tools
    assert rest == (
        "\n sop?<|assistant|>track\n ```python\ntool_call(symbol='it\\'s <|user|>', n=3)\n```"
        '<|observation|>\n {"price": 12412}<|assistant|>'
    )
    ids = template.encode(talk, [TOOL])
    assert [ids.count(IDS[name]) for name in ("<|user|>", "<|assistant|>", "<|observation|>", "sop")] == [1, 2, 1, 1]


def test_decoding_leaves_names_out_where_asked(tokenizer):
    ids = built(tokenizer, TALK[1:2])
    assert tokenizer.decode(ids, skip_special_tokens=True) == "\n hello"
    assert tokenizer.decode(ids).replace(" ", "") == "[gMASK]sop<|user|>\nhello<|assistant|>"


# ------------------------------------------------------------------------------------------------------ with a model

GREEDY = SamplingConfig(max_new_tokens=12, do_sample=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chatglm") / "plain"
    save_tiny(folder, "chatglm", {"vocab_size": 512, "max_position_embeddings": 256, "eos_token_id": 2})
    with LLMModel(checkpoint(folder), dtype="float32", num_threads=1, progress=False) as model:
        yield model


def test_a_chat_goes_on_from_what_the_checkpoints_code_builds(model):
    answer = model.chat(TALK, GREEDY)
    [tokens] = model.generate(built(model.tokenizer, TALK), GREEDY).generated_token_ids
    assert answer.metrics.num_generated_tokens == len(tokens) > 1
    assert answer.text == model.tokenizer.decode(tokens, skip_special_tokens=True).lstrip(" \n")


@pytest.mark.parametrize("end", ["</s>", "<|user|>", "<|observation|>"])
def test_turns_end(model, end):
    token = model.tokenizer.convert_tokens_to_ids(end)
    certain = SamplingConfig(max_new_tokens=12, logit_bias={token: 100.0})
    assert model.chat(TALK, certain).finish_reason == "stop"
    assert model.generate("hello", certain).finish_reasons == ["stop"]


def test_the_line_before_an_answer_is_no_text(model):
    """The tokens are those of the model's training: a blank, the end of the line, and a word."""
    text = "\n hello"
    tokens = encoded(model.tokenizer, "\n") + encoded(model.tokenizer, "hello")
    assert model.tokenizer.decode(tokens) == text

    def say(ids, logits):
        done = min(ids.shape[1] - start, len(tokens))
        logits[:] = float("-inf")
        logits[:, [*tokens, 2][done]] = 0.0
        return logits

    start = len(built(model.tokenizer, TALK))
    answer = model.chat(TALK, SamplingConfig(max_new_tokens=12, logits_processors=[say]))
    assert answer.text == "hello" and answer.finish_reason == "stop"


def in_gguf(path):
    """A GGUF file like the converter's: two names changed, ChatGLM3's tokens appended, padded to the full size."""
    gguf, model = pytest.importorskip("gguf", reason="the gguf package is not installed"), golden("plain")
    types = [*model.types, *[int(gguf.TokenType.CONTROL)] * 9, *[int(gguf.TokenType.UNUSED)] * 7]
    tokens = [*model.pieces, *NAMES, *(f"[PAD{PIECES + 9 + index}]" for index in range(7))]
    tokens[1:3] = ["<bos>", "<eos>"]
    writer = gguf.GGUFWriter(path, "chatglm")
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("chatglm-spm")
    writer.add_token_list(tokens)
    writer.add_token_scores([*model.scores, *[0.0] * 16])
    writer.add_token_types(types)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template("[gMASK]sop{{ messages[0].content }}")
    for step in ("header_to_file", "kv_data_to_file", "ti_data_to_file"):
        getattr(writer, f"write_{step}")()
    writer.close()
    return path


def test_the_vocabulary_in_a_gguf_file(tmp_path):
    found = load_tokenizer(in_gguf(tmp_path / "plain.gguf"))
    expected = load_tokenizer(checkpoint(tmp_path / "plain"))
    for text in ("hello", "a sophisticated user", " two\n\nspaces, 你好", ""):
        assert found(text)["input_ids"] == expected(text)["input_ids"]
    assert ChatTemplate(found).encode(TALK) == built(expected, TALK)
    assert (found.eos_token_id, found.pad_token_id, found.turn_ends) == (2, 0, expected.turn_ends)


def test_a_gguf_file_without_the_tokens_of_roles_is_refused(tmp_path):
    path = in_gguf(tmp_path / "plain.gguf")
    path.write_bytes(path.read_bytes().replace(b"<|user|>", b"<|uzer|>"))
    with pytest.raises(ValueError, match=r"tokenizer.ggml.tokens has no <\|user\|>"):
        load_tokenizer(path)


# --------------------------------------------------------------------------------------------------------- GLM-4-9B


def test_glm4(tmp_path):
    known = ranks()
    (tmp_path / "tokenizer.model").write_bytes(written(known))
    names = [
        "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>",
        "<|assistant|>",
    ]  # fmt: skip
    added = {str(len(known) + i): {"content": name, "special": True} for i, name in enumerate(names)}
    template = "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}<|assistant|>"
    settings = {"tokenizer_class": "ChatGLM4Tokenizer", "added_tokens_decoder": added, "eos_token": "<|endoftext|>"}
    settings |= {"pad_token": "<|endoftext|>", "chat_template": template, "model_max_length": 128000}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(tmp_path)
    ids = dict(zip(names, range(len(known), len(known) + len(names))))
    hello = known[b"hello"]
    assert tokenizer("hello")["input_ids"] == [ids["[gMASK]"], ids["<sop>"], hello]
    assert ChatTemplate(tokenizer).encode(TALK[1:2]) == [
        ids["[gMASK]"], ids["<sop>"], ids["<|user|>"], known[b"\n"], hello, ids["<|assistant|>"],
    ]  # fmt: skip
    assert (tokenizer.eos_token_id, tokenizer.padding_side) == (ids["<|endoftext|>"], "left")
    settings["added_tokens_decoder"] = {"x": 3}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="tokenizer_config.json: added_tokens_decoder must map ids"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer_config.json"])
def test_damaged_files_are_named(tmp_path, name):
    checkpoint(tmp_path)
    (tmp_path / name).write_bytes(b"\n\x05xx")
    with pytest.raises(ValueError, match=name):
        load_tokenizer(tmp_path)
