"""Encoders from GGUF files: the vectors and logits of the checkpoints that they were made from."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("gguf", reason="the gguf package is not installed")
pytest.importorskip("transformers")

from pace.checkpoints.gguf.checkpoint import GgufCheckpoint
from pace.llm import EmbeddingModel
from pace.llm.encoding.embedder import TextTokens
from pace.llm.models.encoders.encoder_list import read_encoder_config
from tests.checkpoints.gguf.encoders.encoder_files import dense_matrices, nothing, write_encoder
from tests.checkpoints.gguf.test_tokenizer import file_with
from tests.llm.models.encoders.variants import Variant, save_encoder
from tests.plugins.tiers import sample

SIZES = {
    "vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 60,
}  # fmt: skip
PADDED = {"pad_token_id": 1, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
LOCAL = {
    "num_hidden_layers": 5, "local_attention": 8, "pad_token_id": 0, "cls_token_id": 1, "bos_token_id": 1,
    "eos_token_id": 2, "sep_token_id": 2,
}  # fmt: skip
GEMMA = {
    "num_hidden_layers": 7, "num_key_value_heads": 1, "head_dim": 16, "query_pre_attn_scalar": 16, "pad_token_id": 0,
    "sliding_window": 12, "use_bidirectional_attention": True,
}  # fmt: skip
ENCODERS = {
    "Bert": SIZES,
    "Roberta": SIZES | PADDED,
    "XLMRoberta": SIZES | PADDED | {"pad_token_id": 3},
    "DistilBert": SIZES | {"hidden_dim": 96},
    "NomicBert": SIZES | {"type_vocab_size": 2},
    "ModernBert": SIZES | LOCAL,
    "ModernBert-silu": SIZES | LOCAL | {"hidden_activation": "silu", "layer_types": ["full_attention",
     "sliding_attention"] * 2 + ["full_attention"]},
    "JinaEmbeddingsV3": SIZES | {"type_vocab_size": 1},
    "Gemma3Text": SIZES | GEMMA,
    "EuroBert": SIZES | {"num_key_value_heads": 2, "pad_token_id": 0},
}  # fmt: skip
"""Names in transformers, and configs."""
CLASSIFIERS = ["Roberta", "XLMRoberta", "DistilBert", "ModernBert-mean", "ModernBert-cls"]
ALWAYS = {"Bert", "XLMRoberta", "Gemma3Text", "ModernBert"}
UNSTATED = {
    "bos_token_id", "eos_token_id", "pad_token_id", "sliding_window_pattern", "global_attn_every_n_layers",
    "tie_word_embeddings", "classifier_pooling",
}  # fmt: skip
"""Fields that a file without a vocabulary does not have, and those that other fields replace or nothing uses."""
TEXTS = [
    TextTokens(tuple(torch.randint(4, 99, (length,), generator=torch.Generator().manual_seed(length)).tolist()))
    for length in (1, 7, 44)
]


def saved(folder, name, kind="Model", pooling="mean", **fields):
    """Returns a tiny model of transformers with random weights, and saves it."""
    family, _, variant = name.partition("-")
    fields = ENCODERS.get(name, ENCODERS[family]) | fields
    if variant in ("mean", "cls"):
        fields |= {"classifier_pooling": variant}
    model = save_encoder(folder, Variant(f"{family}{kind}", fields))
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    if kind == "Model":
        entries = [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{module}"}
            for index, (path, module) in enumerate(modules)
        ]
        (folder / "modules.json").write_text(json.dumps(entries))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": pooling}))
    return model


def load(path, **options):
    return EmbeddingModel(path, **{"dtype": torch.float32, "num_threads": 1, "progress": False, **options})


def vectors(path, texts=TEXTS, **options):
    with load(path, **options) as model:
        return model.embed_tokens(texts)


@pytest.mark.parametrize("name", sample(list(ENCODERS), ALWAYS.__contains__))
def test_float32_vectors_and_the_config(tmp_path, name):
    pooling = "cls" if name in ("XLMRoberta", "NomicBert") else "mean"
    theirs = saved(tmp_path / "hub", name, pooling=pooling)
    write_encoder(tmp_path / "hub", tmp_path / "model.gguf")
    found, of_hub = (vectors(tmp_path / path) for path in ("model.gguf", "hub"))
    assert torch.equal(found, of_hub), "the bits of the checkpoint"
    with torch.no_grad():
        [rows] = theirs(input_ids=torch.tensor([TEXTS[1].tokens])).last_hidden_state
    expected = torch.nn.functional.normalize(rows[0] if pooling == "cls" else rows.mean(0), dim=0)
    assert (found[1] - expected).abs().max() < 2e-6
    with GgufCheckpoint(tmp_path / "model.gguf") as reader:
        encoder, config = read_encoder_config(reader.config)
    other, expected = read_encoder_config(json.loads((tmp_path / "hub" / "config.json").read_text()))
    if encoder is other and name not in ("Roberta", "XLMRoberta", "JinaEmbeddingsV3"):  # without rows of padding
        fields = vars(expected).keys() - UNSTATED
        assert {field: vars(config)[field] for field in fields} == {field: vars(expected)[field] for field in fields}


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("name", sample(CLASSIFIERS, lambda name: name == "XLMRoberta"))
def test_classifiers(tmp_path, name, labels):
    names = {index: f"kind {index}" for index in range(labels)}
    theirs = saved(tmp_path / "hub", name, "ForSequenceClassification", id2label=names)
    write_encoder(tmp_path / "hub", tmp_path / "model.gguf")
    with load(tmp_path / "model.gguf") as model, load(tmp_path / "hub") as of_hub:
        found = model.logits_of(TEXTS)
        assert torch.equal(found, of_hub.logits_of(TEXTS))
        assert model.id2label == names and model.can_rank is (labels == 1)
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor([TEXTS[2].tokens])).logits[0]
    assert (found[2] - expected).abs().max() < 2e-5 * max(1.0, expected.abs().max())


def test_a_bert_with_its_pooler(tmp_path):
    """Its pooler and classifier have the names of RoBERTa's."""
    saved(tmp_path / "hub", "Bert", "ForSequenceClassification", num_labels=1)
    write_encoder(tmp_path / "hub", tmp_path / "model.gguf", keeps=("pooler",))
    with load(tmp_path / "model.gguf") as model, load(tmp_path / "hub") as of_hub:
        pair = [TextTokens((5, 6, 7, 8), (0, 0, 1, 1))]
        assert torch.equal(model.logits_of(pair), of_hub.logits_of(pair)), "types of the second text"


WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4}


BLOCKS = [f"{name} {types}" for name in ("Bert", "NomicBert", "ModernBert", "Gemma3Text") for types in
          ("Q8_0", "Q4_K", "Q6_K", "Q5_0", "IQ4_XS", "BF16")]  # fmt: skip


@pytest.mark.parametrize("case", sample(BLOCKS, {"Bert Q4_K", "Bert Q8_0", "ModernBert Q4_K"}.__contains__))
def test_blocks_have_the_weights_of_the_file(tmp_path, case):
    """The kernels round inputs, so the torch backend is compared with a file that holds the same weights as floats."""
    name, types = case.split()
    saved(tmp_path / "hub", name, **WIDE)
    write_encoder(tmp_path / "hub", tmp_path / "blocks.gguf", types)
    write_encoder(tmp_path / "hub", tmp_path / "floats.gguf", types, as_floats=True)
    blocks, floats = (vectors(tmp_path / f"{stem}.gguf", backend="torch") for stem in ("blocks", "floats"))
    assert (blocks - floats).abs().max() < 2e-6
    native = vectors(tmp_path / "blocks.gguf")
    # The error of 0.5 % of each product grows in layers whose weights are random and large.
    assert torch.nn.functional.cosine_similarity(native, floats).min() > 0.9
    alone = torch.cat([vectors(tmp_path / "blocks.gguf", [text]) for text in TEXTS])
    assert torch.equal(native, alone)


def test_dense_matrices_of_embedding_gemma(tmp_path):
    saved(tmp_path / "hub", "Gemma3Text")
    write_encoder(tmp_path / "hub", tmp_path / "plain.gguf")
    write_encoder(tmp_path / "hub", tmp_path / "model.gguf", dense=2)
    with load(tmp_path / "plain.gguf") as model:
        x = model.embed_tokens(TEXTS, normalise=False).double()
    for _, matrix in dense_matrices(64, 2):
        x = x @ torch.from_numpy(matrix).double().T
    found = vectors(tmp_path / "model.gguf")
    assert (found - torch.nn.functional.normalize(x, dim=1)).abs().max() < 1e-6


def test_causal_models_pool_as_their_files_say(tmp_path):
    from tests.checkpoints.gguf.files import write_gguf
    from tests.llm.models.variants import save_tiny

    save_tiny(tmp_path / "hub", "qwen3", {})
    found = {}
    for number, name in enumerate(("none", "mean", "cls", "lasttoken")):
        path = tmp_path / f"{name}.gguf"
        write_gguf(tmp_path / "hub", path, add=lambda writer: writer.add_uint32("qwen3.pooling_type", number))
        found[name] = vectors(path)
    assert torch.equal(found["none"], found["lasttoken"]), "the default of causal models"
    assert torch.equal(found["mean"][0], found["cls"][0]), "a text of one token"
    assert len({tuple(found[name][2].tolist()) for name in ("mean", "cls", "lasttoken")}) == 3


def change(name, value, kind="uint32"):
    def add(writer):
        key = f"{writer.arch}.{name}"
        writer.kv_data[0].pop(key, None)
        getattr(writer, f"add_{kind}")(key, value)

    return add


@pytest.mark.parametrize(
    ("name", "kind", "add", "error", "message"),
    [
        ("Bert", "ForSequenceClassification", nothing, NotImplementedError, "a classifier without the matrix before"),
        ("Bert", "Model", change("pooling_type", 9), NotImplementedError, r"pooling_type = 9 is not .*1 \(mean\)"),
        ("Bert", "Model", change("pooling_type", 4), ValueError, "pooling_type .*rank.* no classifier"),
        ("Bert", "Model", change("context_length", 61), ValueError, "position_embeddings.weight has shape"),
        ("Bert", "Model", change("attention.max_alibi_bias", 8.0, "float32"), NotImplementedError, "alibi = 8.0"),
        ("Roberta", "ForSequenceClassification", change("classifier.output_labels", ["a"], "array"), ValueError,
         "output_labels has 1 labels, and cls.output.weight 2 rows"),
        ("ModernBert", "Model", change("classifier.pooling_type", 3), NotImplementedError, "pooling_type = 3 is not"),
        ("ModernBert", "Model", change("hidden_activation", "x", "string"), (ValueError, NotImplementedError),
         "hidden_activation"),
    ],
)  # fmt: skip
def test_what_a_file_must_not_say(tmp_path, name, kind, add, error, message):
    saved(tmp_path / "hub", name, kind)
    write_encoder(tmp_path / "hub", tmp_path / "model.gguf", add=add)
    with pytest.raises(error, match=message) as raised:
        load(tmp_path / "model.gguf")
    assert "model.gguf" in str(raised.value)


@pytest.mark.parametrize("architecture", ["jina-bert-v2", "neo-bert"])
def test_other_encoders_are_refused_by_name(tmp_path, architecture):
    path = file_with(tmp_path / "model.gguf", architecture=architecture)
    with pytest.raises(NotImplementedError, match=f"the architecture '{architecture}', .*implemented: .*bert, nomic"):
        load(path)


def test_matrices_after_pooling_must_fit(tmp_path):
    saved(tmp_path / "hub", "Gemma3Text")
    write_encoder(tmp_path / "hub", tmp_path / "model.gguf", dense=1)
    with load(tmp_path / "model.gguf") as model:
        assert model.dimensions == 256


@pytest.mark.parametrize("tied", [True, False])
def test_a_reranker_has_the_rows_of_two_answers(tmp_path, tied):
    """Files of Qwen3-Reranker have two rows of the head, and no head."""
    from safetensors.torch import load_file

    from tests.checkpoints.gguf.files import add_tokenizer, write_gguf
    from tests.llm.models.variants import save_tiny
    from tests.llm.text.tokenizer_zoo import byte_level

    save_tiny(tmp_path / "hub", "qwen3", {"tie_word_embeddings": tied, "vocab_size": 300})
    state = load_file(tmp_path / "hub" / "model.safetensors")
    rows = state["model.embed_tokens.weight" if tied else "lm_head.weight"][[7, 9]].float()

    def answers(writer):
        writer.add_uint32("qwen3.pooling_type", 4)
        writer.add_array("qwen3.classifier.output_labels", ["yes", "no"])
        writer.add_tensor("cls.output.weight", rows.numpy())
        add_tokenizer(writer, byte_level(), "qwen2")

    write_gguf(tmp_path / "hub", tmp_path / "model.gguf", add=answers, without=("lm_head",))
    with load(tmp_path / "model.gguf", max_seq_len=50) as model, load(tmp_path / "hub") as of_hub:
        last = of_hub.embed_tokens(TEXTS, normalise=False)
        expected = torch.sigmoid((last.double() @ (rows[0] - rows[1]).double()).float())
        assert (model.scores_of(TEXTS) - expected).abs().max() < 1e-6
        assert model.can_rank and model.num_labels == 1
        with pytest.raises(ValueError, match="more than the 50 of this model"):
            model.rank("fox", ["the end"])  # its prompt is long
