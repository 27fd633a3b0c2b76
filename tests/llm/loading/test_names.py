"""Loading: accepted tensor names, and the errors for checkpoints that do not fit."""

from __future__ import annotations

import logging
import threading

import pytest
import torch

from pace.llm.layers import TiedLMHead
from pace.llm.models.model_list import read_config
from pace.ops import reference
from tests.support import TensorDict, prefill
from tests.waiting import PATIENCE

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
IDS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])


def make(architecture="LlamaForCausalLM", dtype=torch.float32, **fields):
    model_class, config = read_config({"architectures": [architecture], **SIZES, "intermediate_size": 24, **fields})
    return model_class(config, dtype, reference)


def random_state(model, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(target.shape, generator=generator).to(dtype) for name, [target] in model.targets().items()
    }


def logits(state, architecture="LlamaForCausalLM", **fields):
    model = make(architecture, **fields)
    model.load_weights(TensorDict(state))
    return prefill(model, IDS)


def test_a_model_costs_nothing_before_its_checkpoint_fits():
    model = make(hidden_size=2**20, num_attention_heads=2**11, vocab_size=2**20)
    state = random_state(make())
    assert model.nbytes == 0
    with pytest.raises(ValueError, match="shape"):
        model.load_weights(TensorDict(state))
    assert model.nbytes == 0


def test_one_error_lists_everything_that_is_wrong():
    model = make()
    state = random_state(model)
    del state["model.layers.0.mlp.up_proj.weight"], state["model.norm.weight"]
    state["model.layers.2.mlp.up_proj.weight"] = torch.zeros(24, 16)
    state["model.layers.1.self_attn.q_proj.bias"] = torch.ones(16)
    state["model.embed_tokens.weight"] = torch.zeros(41, 16)
    state["lm_head.weight"] = torch.zeros(40, 16, dtype=torch.int8)
    with pytest.raises(ValueError) as caught:
        model.load_weights(TensorDict(state))
    message = str(caught.value)
    assert "missing (2): model.layers.0.mlp.up_proj.weight, model.norm.weight" in message
    assert "unexpected (2): model.layers.1.self_attn.q_proj.bias, model.layers.2.mlp.up_proj.weight" in message
    assert "model.embed_tokens.weight has shape [41, 16], the config demands [40, 16]" in message
    assert "lm_head.weight is torch.int8" in message


def test_known_extras_are_ignored_and_only_those():
    state = random_state(make())
    expected = logits(state)
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    assert torch.equal(logits(state), expected)
    state["model.layers.0.self_attn.inv_freq"] = torch.zeros(4)
    with pytest.raises(ValueError, match="unexpected"):
        logits(state)

    del state["model.layers.0.self_attn.inv_freq"]
    for name in ("model.layers.0.self_attn.q_proj.bias", "model.norm.bias"):  # some checkpoints store zero biases
        state[name] = torch.zeros(16)
        assert torch.equal(logits(state), expected)
        state[name][3] = 1
        with pytest.raises(ValueError, match=f"unexpected .*{name}"):
            logits(state)
        del state[name]

    gptj = random_state(make("GPTJForCausalLM", rotary_dim=4))
    gptj["transformer.h.1.attn.bias"] = torch.zeros(1, 1, 32, 32, dtype=torch.bool)
    gptj["transformer.h.1.attn.masked_bias"] = torch.tensor(-1e9)
    logits(gptj, "GPTJForCausalLM", rotary_dim=4)


@pytest.mark.parametrize(
    ("architecture", "prefix"),
    [("LlamaForCausalLM", "model."), ("OPTForCausalLM", "model."), ("GPTJForCausalLM", "transformer.")],
)
def test_a_checkpoint_of_the_bare_decoder_lacks_the_prefix(architecture, prefix):
    fields = {"rotary_dim": 4} if architecture.startswith("GPTJ") else {}
    state = random_state(make(architecture, **fields))
    bare = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    assert bare.keys() != state.keys()
    assert torch.equal(logits(bare, architecture, **fields), logits(state, architecture, **fields))


def test_tied_weights_exist_once():
    tied, untied = make(tie_word_embeddings=True), make()
    state = random_state(tied)
    assert "lm_head.weight" not in state
    tied.load_weights(TensorDict(state))
    untied.load_weights(TensorDict({**state, "lm_head.weight": state["model.embed_tokens.weight"]}))
    assert untied.nbytes - tied.nbytes == 40 * 16 * 4
    assert torch.equal(prefill(tied, IDS), prefill(untied, IDS))
    assert sum(tied.resident_bytes().values()) == tied.nbytes
    assert tied.resident_bytes()["TiedLMHead"] == 0


def test_tied_weights_as_transformers_reads_them(caplog):
    state = random_state(make(tie_word_embeddings=True))
    embedding = state["model.embed_tokens.weight"]
    expected = logits(state, tie_word_embeddings=True)
    both = {**state, "lm_head.weight": embedding.clone()}
    assert torch.equal(logits(both, tie_word_embeddings=True), expected)
    only_head = {name: tensor for name, tensor in both.items() if name != "model.embed_tokens.weight"}
    assert torch.equal(logits(only_head, tie_word_embeddings=True), expected)

    with caplog.at_level(logging.WARNING, logger="pace"):
        different = {**state, "lm_head.weight": embedding + 1}
        assert torch.equal(logits(different, tie_word_embeddings=True), logits(different))
    assert "not tied" in caplog.text
    with pytest.raises(ValueError, match=r"missing \(1\): lm_head.weight"):
        logits(state)


def test_a_head_and_an_embedding_are_compared_in_pieces():
    """Either can be most of the checkpoint. If mapped as a whole, both would count as resident memory."""
    state = random_state(make(tie_word_embeddings=True))
    held: set[tuple[str, int]] = set()

    class Reader(TensorDict):
        def read(self, name, start=0, stop=None):
            rows = super().read(name, start, stop)
            assert len(rows) <= 24
            held.add((name, start))
            assert len(held) <= 2
            return rows

        def release(self, name, start=0, stop=None):
            held.remove((name, start))

    for changed, tied in ((slice(0, 0), True), (slice(30, 31), False)):
        head = state["model.embed_tokens.weight"].clone()
        head[changed] += 1
        model = make(tie_word_embeddings=True)
        model.load_weights(Reader({**state, "lm_head.weight": head}))
        assert isinstance(model.lm_head, TiedLMHead) == tied
        assert not held


def test_float16_refuses_what_it_cannot_hold():
    model = make(dtype=torch.float16)
    state = random_state(model, torch.bfloat16)
    model.load_weights(TensorDict(state))
    state["model.layers.1.mlp.down_proj.weight"][3, 3] = -1e5
    with pytest.raises(ValueError, match="down_proj.*float16"):
        make(dtype=torch.float16).load_weights(TensorDict(state))


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_any_dtype_loads_as_any(source, dtype):
    model = make(dtype=dtype)
    state = random_state(model, source)
    model.load_weights(TensorDict(state))
    weight = reference.unpack(model.layers[0].mlp.down.weight)
    assert torch.equal(weight, state["model.layers.0.mlp.down_proj.weight"].to(dtype))
    assert torch.equal(model.final_norm.weight.values, state["model.norm.weight"].float())
    assert prefill(model, IDS).dtype == torch.float32


def test_reading_is_parallel_reports_progress_and_releases():
    model = make()
    state = random_state(model)
    released, threads, bytes_read = [], set(), []
    meeting = threading.Barrier(2, timeout=PATIENCE)

    class Reader(TensorDict):
        def read(self, name, start, stop):
            threads.add(threading.get_ident())
            if (name, start) in pieces[:2]:
                meeting.wait()  # fails unless both workers are here at once
            return super().read(name, start, stop)

        def release(self, name, start, stop):
            released.append((name, start))

    reader = Reader(state)
    pieces = [(name, start) for name in state for start, _ in reader.row_ranges(name)]
    assert len(pieces) > len(state)
    model.load_weights(reader, workers=2, progress=bytes_read.append)
    assert len(threads) == 2
    assert sorted(released) == sorted(pieces)
    assert sum(bytes_read) == sum(tensor.nbytes for tensor in state.values())


def test_an_error_while_reading_is_raised_and_stops_the_rest():
    model = make()
    state = random_state(model)
    read = []

    class Reader(TensorDict):
        def read(self, name, start, stop):
            read.append(name)
            raise OSError(f"cannot read {name}")

    with pytest.raises(OSError, match="cannot read"):
        model.load_weights(Reader(state))
    assert len(read) < len(state)


def test_weights_beyond_memory_are_refused_before_anything_is_read(monkeypatch):
    fits, state = make(), random_state(make())
    fits.load_weights(TensorDict(state))
    monkeypatch.setattr("pace.llm.loading.memory.available_memory_bytes", lambda: fits.nbytes)
    make().load_weights(TensorDict(state))
    monkeypatch.setattr("pace.llm.loading.memory.available_memory_bytes", lambda: fits.nbytes - 1)
    refused = make()
    with pytest.raises(MemoryError, match="GiB as float32.*load with dtype=bfloat16"):
        refused.load_weights(TensorDict(state))
    assert refused.nbytes == 0


def test_dtype_must_be_a_float():
    with pytest.raises(ValueError, match="dtype"):
        make(dtype=torch.int8)
