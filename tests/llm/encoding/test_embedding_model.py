"""`EmbeddingModel`: vectors, scores and labels of encoders and of causal models, and what it refuses."""

from __future__ import annotations

import json

import pytest
import torch
from torch.nn import functional

from pace.llm import EmbeddingModel, LLMModel
from pace.llm.encoding.embedder import TextTokens
from pace.llm.encoding.instructions import PairPrompt
from tests.llm.encoding.checkpoints import (
    save_bert,
    save_causal,
    write_dense,
    write_json,
    write_modules,
)

transformers = pytest.importorskip("transformers")

TEXTS = ["what is a fox?", "a", "one, two, three. a long text of words", "no"]
PAIRS = [("what?", "a fox"), ("what?", "one two three four five"), ("a long question of words?", "no")]
POOLING = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}


def load(folder, **options) -> EmbeddingModel:
    return EmbeddingModel(folder, progress=False, **options)


@torch.no_grad()
def oracle_rows(folder, oracle, texts) -> list[torch.Tensor]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return [oracle.base_model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0] for text in texts]


@torch.no_grad()
def oracle_logits(folder, oracle, inputs, **options) -> torch.Tensor:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return torch.cat([oracle(**tokenizer(*text, return_tensors="pt", **options)).logits for text in inputs])


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    return folder, save_bert(folder)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen")
    return folder, save_causal(folder)


# -- vectors -----------------------------------------------------------------------------------------------------------


def test_an_encoder_without_modules_gives_the_mean_of_its_rows(bert):
    folder, oracle = bert
    expected = torch.stack([rows.mean(0) for rows in oracle_rows(folder, oracle, TEXTS)])
    with load(folder) as model:
        found = model.embed(TEXTS)
        assert found.shape == (4, 32) and found.dtype == torch.float32
        assert (found - expected).abs().max() < 1e-5
        assert torch.equal(torch.cat([model.embed(text) for text in TEXTS]), found)
        assert torch.equal(model.embed_tokens(model.tokenize(TEXTS)), found)
        unit = functional.normalize(expected, dim=1)
        assert (model.embed(tuple(TEXTS), normalise=True) - unit).abs().max() < 1e-6
        assert (model.dimensions, model.matryoshka_dimensions, model.num_labels, model.can_rank) == (32, (), 0, False)
        assert model.embed([]).shape == (0, 32)
        assert "32 dimensions, up to 64 tokens" in repr(model)


def test_a_causal_model_without_modules_gives_the_row_of_its_last_token(tmp_path):
    oracle = save_causal(tmp_path, ends=True)
    expected = torch.stack([rows[-1] for rows in oracle_rows(tmp_path, oracle, TEXTS)])
    with load(tmp_path) as model:
        assert (model.embed(TEXTS) - expected).abs().max() < 1e-5 * expected.abs().max()
    with LLMModel(tmp_path, dtype="float32", progress=False) as model:
        found = model.embed(TEXTS, normalise=True, dimensions=7)
        assert (found - functional.normalize(expected[:, :7], dim=1)).abs().max() < 1e-5


def test_modules_prompts_and_dimensions(tmp_path):
    oracle = save_bert(tmp_path)
    dense = {
        "in_features": 64,
        "out_features": 24,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    pooling = {"embedding_dimension": 32, "pooling_mode": ["cls", "max"]}
    write_modules(tmp_path, ("Pooling", pooling), ("Dense", dense), ("Normalize", None))
    weight, bias = torch.randn(24, 64) / 8, torch.randn(24)
    write_dense(tmp_path / "2_Dense", {"linear.weight": weight, "linear.bias": bias})
    prompts = {"query": "query: ", "document": ""}
    path = tmp_path / "config_sentence_transformers.json"
    write_json(path, {"prompts": prompts, "default_prompt_name": "query"})
    write_json(tmp_path / "sentence_bert_config.json", {"max_seq_length": 12})

    def vectors(texts):
        rows = oracle_rows(tmp_path, oracle, texts)
        pooled = torch.stack([torch.cat([row[0], row.amax(0)]) for row in rows])
        return torch.tanh(functional.linear(pooled, weight, bias))

    short = ["a fox", "no"]
    with load(tmp_path) as model:
        assert (model.dimensions, model.max_length, model.prompts) == (24, 12, prompts)
        for prompt, prefix in [(None, "query: "), ("query", "query: "), ("document", "")]:
            expected = vectors([prefix + text for text in short])
            assert (model.embed(short, prompt) - functional.normalize(expected, dim=1)).abs().max() < 1e-6, prompt
        cut = model.embed(short, "document", dimensions=9)
        assert (cut - functional.normalize(expected[:, :9], dim=1)).abs().max() < 1e-6
        assert (model.embed(short, "document", 9, normalise=False) - expected[:, :9]).abs().max() < 1e-6
        for message, arguments in [
            ("one of this model's prompts, 'query', 'document'; got 'passage'", {"prompt": "passage"}),
            ("from 1 to 24 for this model; got 25", {"dimensions": 25}),
            ("from 1 to 24 for this model; got 0", {"dimensions": 0}),
            ("text 0 has 15 tokens, more than the 12", {"truncate": False}),
        ]:
            with pytest.raises(ValueError, match=message):
                model.embed("what is a", **arguments)
    with load(tmp_path, max_seq_len=40) as model:
        assert model.max_length == 40
    write_json(path, {"truncate_dim": 6})
    config = json.loads((tmp_path / "config.json").read_text())
    write_json(tmp_path / "config.json", config | {"matryoshka_dimensions": [4, 8]})
    with load(tmp_path) as model:
        assert (model.dimensions, model.matryoshka_dimensions) == (6, (4, 8))
        assert model.embed(short).shape == (2, 6) and model.embed(short, dimensions=8).shape == (2, 8)
        with pytest.raises(ValueError, match="dimensions must be one of 4, 8 for this model; got 5"):
            model.embed(short, dimensions=5)
        with pytest.raises(TypeError, match="dimensions must be an int"):
            model.embed(short, dimensions=4.0)
        with pytest.raises(TypeError, match="normalise must be True, False or None; got 'yes'"):
            model.embed(short, normalise="yes")


def test_long_texts_are_cut_as_transformers_cuts_them(bert):
    folder, oracle = bert
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    long = "word " * 40
    cut = tokenizer(long, truncation=True, max_length=64)["input_ids"]
    with load(folder) as model:
        assert list(model.tokenize(long)[0].tokens) == cut
        assert torch.equal(model.embed(long), model.embed_tokens([TextTokens(tuple(cut))]))


def test_checkpoints_without_a_head_and_with_bare_names(tmp_path):
    oracle = save_causal(tmp_path / "whole", tie_word_embeddings=False)
    bare = oracle.base_model
    bare.save_pretrained(tmp_path / "bare")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "bare" / name).write_text((tmp_path / "whole" / name).read_text())
    names = ["Qwen3Model", "Qwen3ForCausalLM"]
    with load(tmp_path / "whole") as model:
        expected = model.embed(TEXTS)
        assert model.can_rank
    for name in names:
        config = json.loads((tmp_path / "bare" / "config.json").read_text())
        write_json(tmp_path / "bare" / "config.json", config | {"architectures": [name]})
        with load(tmp_path / "bare") as model:
            assert torch.equal(model.embed(TEXTS), expected)
            with pytest.raises(ValueError, match="cannot rank: .* nor an LM head"):
                model.rank("a", ["b"])
        with pytest.raises(ValueError, match="lm_head"):
            LLMModel(tmp_path / "bare", progress=False)


# -- scores and labels -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bert", "qwen3"])
def test_classifiers_with_one_label_rank(kind, tmp_path):
    save, name = (
        (save_bert, "BertForSequenceClassification")
        if kind == "bert"
        else (save_causal, "Qwen3ForSequenceClassification")
    )
    oracle = save(tmp_path, name, num_labels=1)
    expected = oracle_logits(tmp_path, oracle, PAIRS)
    with load(tmp_path) as model:
        assert (model.num_labels, model.can_rank, model.id2label) == (1, True, {0: "LABEL_0"})
        tokens = model.tokenize_pairs(PAIRS)
        assert (model.logits_of(tokens) - expected).abs().max() < 1e-4
        scores = model.score(PAIRS)
        assert (scores - torch.sigmoid(expected[:, 0])).abs().max() < 1e-5
        assert torch.equal(torch.cat([model.score([pair]) for pair in PAIRS]), scores)
        documents = [document for _, document in PAIRS]
        ranked = model.rank("what?", documents)
        found = model.score([("what?", document) for document in documents])
        assert ranked == sorted(enumerate(found.tolist()), key=lambda pair: -pair[1])
        assert torch.equal(model.classify(PAIRS)[:, 0], scores)
        with pytest.raises(ValueError, match="instruction has no place"):
            model.score(PAIRS, instruction="find foxes")
        with pytest.raises(ValueError, match="text 0 has .* tokens, more than"):
            model.score([("a", "b " * 600)])
        cut = model.score([("a", "b " * 600)], truncate=True)
        wanted = oracle_logits(
            tmp_path, oracle, [("a", "b " * 600)], truncation="longest_first", max_length=model.max_length
        )
        assert cut.item() == pytest.approx(torch.sigmoid(wanted).item(), abs=1e-5)
        assert model.rank("a", []) == [] and model.score([]).shape == (0,)


@pytest.mark.parametrize("kind", ["bert", "qwen3"])
def test_classifiers_with_several_labels_classify(kind, tmp_path):
    save, name = (
        (save_bert, "BertForSequenceClassification")
        if kind == "bert"
        else (save_causal, "Qwen3ForSequenceClassification")
    )
    labels = {0: "bad", 1: "good", 2: "odd"}
    oracle = save(tmp_path, name, id2label=labels, label2id={name: index for index, name in labels.items()})
    expected = oracle_logits(tmp_path, oracle, [(text,) for text in TEXTS])
    with load(tmp_path) as model:
        assert model.id2label == labels
        found = model.classify(TEXTS)
        assert (found - expected.softmax(1)).abs().max() < 1e-5
        assert torch.equal(torch.cat([model.classify(text) for text in TEXTS]), found)
        for call in (lambda: model.rank("a", ["b"]), lambda: model.score(PAIRS), lambda: model.to_scores(expected)):
            with pytest.raises(ValueError, match="cannot rank: its classifier has 3 labels"):
                call()
    config = json.loads((tmp_path / "config.json").read_text())
    write_json(tmp_path / "config.json", config | {"problem_type": "multi_label_classification"})
    with load(tmp_path) as model:
        assert (model.classify(TEXTS) - expected.sigmoid()).abs().max() < 1e-5


def test_a_classifier_of_a_causal_model_reads_the_last_token_that_is_no_padding(tmp_path):
    oracle = save_causal(tmp_path, "Qwen3ForSequenceClassification", ends=True, num_labels=2)
    pad = oracle.config.pad_token_id
    texts = [(5, 6, pad, 7, pad, pad), (pad, pad), (5, 6)]
    with load(tmp_path) as model, torch.no_grad():
        found = model.logits_of([TextTokens(text) for text in texts])
        for text, row in zip(texts, found):
            assert (row - oracle(torch.tensor([text])).logits[0]).abs().max() < 1e-4


def test_a_qwen3_model_answers_yes_or_no(qwen):
    folder, oracle = qwen
    documents = ["a fox", "one two three", "no"]
    with load(folder) as model, LLMModel(folder, dtype="float32", progress=False) as language_model:
        yes, no = model.tokenizer.convert_tokens_to_ids(["yes", "no"])
        for instruction in (None, "Find foxes"):
            prompts = PairPrompt(model.tokenizer, 512).pairs(
                [("what?", text) for text in documents], instruction, False
            )
            with torch.no_grad():
                logits = [oracle(torch.tensor([prompt.tokens])).logits[0, -1] for prompt in prompts]
            expected = torch.stack([row[[no, yes]].softmax(0)[1] for row in logits])
            scores = model.score([("what?", text) for text in documents], instruction=instruction)
            assert (scores - expected).abs().max() < 1e-5
            ranked = model.rank("what?", documents, instruction=instruction)
            assert ranked == sorted(enumerate(scores.tolist()), key=lambda pair: -pair[1])
            assert language_model.rank("what?", documents, instruction=instruction) == ranked
        assert model.logits_of(model.tokenize_pairs([("a", "b")])).shape == (1, 1)
        with pytest.raises(ValueError, match="has no classifier"):
            model.classify(TEXTS)


def test_the_prompt_of_a_cross_encoder_is_before_the_first_text(tmp_path):
    """So does sentence-transformers. For a model that answers yes or no, it is the task."""
    prompts = {"prompts": {"web": "one: "}, "default_prompt_name": "web", "model_type": "CrossEncoder"}
    save_bert(tmp_path / "bert", "BertForSequenceClassification", num_labels=1)
    save_causal(tmp_path / "qwen")
    prompted = [("one: what?", "a fox")]
    with load(tmp_path / "bert") as model:
        expected = model.score(prompted), model.classify(prompted), model.classify(["one: what?"])
    with load(tmp_path / "qwen") as model:
        answer = model.score([("what?", "a fox")], instruction="one: ")
    for folder in ("bert", "qwen"):
        write_json(tmp_path / folder / "config_sentence_transformers.json", prompts)
    pair = [("what?", "a fox")]
    with load(tmp_path / "bert") as model:
        found = model.score(pair), model.classify(pair), model.classify(["what?"])
        assert all(map(torch.equal, found, expected))
        assert model.rank("what?", ["a fox"]) == [(0, expected[0].item())]
    with load(tmp_path / "qwen") as model:
        assert torch.equal(model.score(pair), answer)
        assert not torch.equal(model.score(pair, instruction="Find foxes"), answer)


def test_answers_that_modules_name(tmp_path):
    oracle = save_causal(tmp_path)
    write_modules(tmp_path, ("LogitScore", {"true_token_id": 9, "false_token_id": None}))
    with load(tmp_path) as model, torch.no_grad():
        (prompt,) = model.tokenize_pairs([("a", "b")])
        logit = oracle(torch.tensor([prompt.tokens])).logits[0, -1, 9]
        assert model.score([("a", "b")]).item() == pytest.approx(torch.sigmoid(logit).item(), abs=1e-5)


def test_pairs_of_answers_are_written_as_the_files_say(tmp_path):
    """In a chat template, or as for a classifier; the model may be of any family."""
    oracle = save_causal(tmp_path, "LlamaForCausalLM", ends=True, head_dim=8)
    write_modules(tmp_path, ("LogitScore", {"true_token_id": 9, "false_token_id": 7}))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    form = {"method": "forward", "method_output_name": "logits"}
    prompts = tmp_path / "config_sentence_transformers.json"
    template = "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template + "{% if add_generation_prompt %}So{% endif %}")

    def written(forms, **more):
        settings = {"transformer_task": "text-generation", "modality_config": forms, **more}
        write_json(tmp_path / "sentence_bert_config.json", settings)

    def check(ids, **options):
        with load(tmp_path, max_seq_len=200) as model, torch.no_grad():
            logits = oracle(torch.tensor([ids])).logits[0, -1]
            found = model.score([("what?", "a fox")], **options).item()
            assert found == pytest.approx(torch.sigmoid(logits[9] - logits[7]).item(), abs=1e-5)

    def rendered(system=""):
        return f"{system}<|im_start|>query: what?<|im_end|><|im_start|>document: a fox<|im_end|>So"

    ids = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    written({"text": form})
    check(tokenizer("what?", "a fox")["input_ids"])
    chat = {"text": form, "message": form | {"format": "flat"}}
    written(chat, processing_kwargs={"chat_template": {"add_generation_prompt": True}})
    check(ids(rendered()))
    check(ids(rendered("<|im_start|>system: Find foxes<|im_end|>")), instruction="Find foxes")
    write_json(prompts, {"prompts": {"a": "web"}, "default_prompt_name": "a", "model_type": "CrossEncoder"})
    check(ids(rendered("<|im_start|>system: web<|im_end|>")))
    with load(tmp_path, max_seq_len=90) as model:
        assert len(model.tokenize_pairs([("a", "b" * 200)], truncate=True)[0]) == 90
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(NotImplementedError, match='roles "query" and "document"'):
        load(tmp_path)
    written(chat, processing_kwargs={"text": {"max_length": 3}})
    with pytest.raises(NotImplementedError, match="processing_kwargs"):
        load(tmp_path)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_models_that_cannot_rank_say_why(bert, checkpoint):
    with load(bert[0]) as model:
        for call in (lambda: model.rank("a", ["b"]), lambda: model.tokenize_pairs([("a", "b")])):
            with pytest.raises(ValueError, match="cannot rank: it has no classifier"):
                call()
        with pytest.raises(ValueError, match="has no classifier, so it has no labels"):
            model.classify("a")
    with load(checkpoint("llama")[0]) as model:
        with pytest.raises(ValueError, match="cannot rank: LlamaForCausalLM has no classifier, and only Qwen3"):
            model.rank("a", ["b"])


def test_arguments_of_the_wrong_type(bert):
    with load(bert[0]) as model:
        for message, call in [
            ("texts must be a string or a list of strings; got 3", lambda: model.embed(3)),
            (r"texts must be .* got \['a', 3\]", lambda: model.embed(["a", 3])),
        ]:
            with pytest.raises(TypeError, match=message):
                call()
        with pytest.raises(ValueError, match="text 1 is not valid text"):
            model.embed(["a", "\ud800"])
        with pytest.raises(TypeError, match="unknown|has no option"):
            EmbeddingModel(bert[0], pooling="mean")
    with pytest.raises(ValueError, match="this model is closed; load it again with EmbeddingModel"):
        model.embed("a")
    model.close()


def test_each_class_names_the_other(bert, tmp_path):
    save_causal(tmp_path, "Qwen3ForSequenceClassification")
    for folder, name in [(bert[0], "BertModel"), (tmp_path, "Qwen3ForSequenceClassification")]:
        with pytest.raises(NotImplementedError, match=f"{name}.* load it with EmbeddingModel"):
            LLMModel(folder, progress=False)
    write_json(tmp_path / "config.json", {"architectures": ["T5EncoderModel"]})
    with pytest.raises(
        NotImplementedError, match="'T5EncoderModel' is not implemented; implemented: .*BertModel.*Qwen3For"
    ):
        EmbeddingModel(tmp_path, progress=False)


def test_settings_are_checked_before_weights_are_read(tmp_path):
    save_bert(tmp_path)
    write_modules(tmp_path, ("CNN", {}))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(NotImplementedError, match="CNN"):
        load(tmp_path)


def test_models_of_other_modules_are_refused_by_name_without_a_config_json(tmp_path):
    for kind in ("StaticEmbedding", "Router", "WordEmbeddings", "Pooling"):
        of_version_6 = f"sentence_transformers.sentence_transformer.modules.{kind.lower()}.{kind}"
        write_json(tmp_path / "modules.json", [{"idx": 0, "path": f"0_{kind}", "type": of_version_6}])
        with pytest.raises(NotImplementedError, match=f"module 0, '{kind}'"):
            load(tmp_path)


def test_weights_keep_their_dtype(tmp_path):
    oracle = save_bert(tmp_path)
    oracle.bfloat16().save_pretrained(tmp_path)
    with load(tmp_path) as model, load(tmp_path, dtype="float32") as other:
        assert model.embedder.encoder.dtype == torch.bfloat16
        found, expected = model.embed(TEXTS), other.embed(TEXTS)  # some kernels round inputs to bfloat16, too
        assert (found - expected).abs().max() < 8 * 2**-8 * expected.abs().max()
