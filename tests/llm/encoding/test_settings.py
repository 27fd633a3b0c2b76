"""Files of sentence-transformers, read and refused."""

from __future__ import annotations

import json

import pytest

from pace.llm.encoding.settings import ANSWERS, DenseSettings, EncodingSettings, Normalise, read_settings
from tests.llm.encoding.checkpoints import write_json, write_modules

POOLING = {"word_embedding_dimension": 32, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
FORM = {"method": "forward", "method_output_name": "last_hidden_state"}
DENSE = {
    "in_features": 32,
    "out_features": 8,
    "bias": False,
    "activation_function": "torch.nn.modules.linear.Identity",
}


def test_a_checkpoint_without_these_files_has_the_defaults(tmp_path):
    assert read_settings(tmp_path) == EncodingSettings()


def test_all_files_are_read(tmp_path):
    write_modules(tmp_path, ("Pooling", POOLING), ("Dense", DENSE | {"use_residual": True}), ("Normalize", None))
    write_json(
        tmp_path / "config_sentence_transformers.json",
        {
            "__version__": {"pytorch": "2"},
            "prompts": {"query": "q: ", "document": None},
            "default_prompt_name": "query",
            "similarity_fn_name": "cosine",
            "truncate_dim": 4,
        },
    )
    write_json(tmp_path / "sentence_xlm-roberta_config.json", {"max_seq_length": 128, "do_lower_case": True})
    found = read_settings(tmp_path)
    assert found == EncodingSettings(
        pooling=("mean",),
        pooled_size=32,
        after=(DenseSettings(tmp_path / "2_Dense", 32, 8, False, None, True), Normalise()),
        prompts={"query": "q: ", "document": ""},
        default_prompt_name="query",
        truncate_dim=4,
        max_length=128,
        lower_case=True,
    )
    assert found.normalises


def test_forms_of_pooling(tmp_path):
    names = ["cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken"]
    for config, expected in [
        (
            {f"pooling_mode_{name}": True for name in reversed(names)},
            "cls max mean mean_sqrt_len_tokens weightedmean lasttoken",
        ),
        ({"pooling_mode_mean_tokens": False}, "mean"),
        ({"pooling_mode": "lasttoken"}, "lasttoken"),
        ({"pooling_mode": ["max", "cls"], "pooling_mode_mean_tokens": True}, "max cls"),
        ({"pooling_mode": "cls", "include_prompt": True}, "cls"),
    ]:
        write_modules(tmp_path, ("Pooling", {"embedding_dimension": 32, **config}))
        assert read_settings(tmp_path).pooling == tuple(expected.split()), config


def test_module_types_count_by_their_last_name(tmp_path):
    kinds = {
        "": "custom_st.Transformer",
        "1_Pooling": "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
        "2_Normalize": "sentence_transformers.base.modules.normalize.Normalize",
    }
    modules = [{"idx": index, "path": path, "type": kind} for index, (path, kind) in enumerate(kinds.items())]
    write_json(tmp_path / "modules.json", modules)
    write_json(tmp_path / "1_Pooling" / "config.json", POOLING)
    assert read_settings(tmp_path).normalises


def test_the_default_prompt_of_a_cross_encoder_is_that_of_its_pairs(tmp_path):
    fields = {"prompts": {"web": "Search: "}, "default_prompt_name": "web", "similarity_fn_name": "dot"}
    for kind, expected in [("CrossEncoder", "Search: "), ("SentenceTransformer", "")]:
        write_json(tmp_path / "config_sentence_transformers.json", fields | {"model_type": kind})
        found = read_settings(tmp_path)
        assert (found.pair_prompt, found.similarity) == (expected, "dot")


def test_answers_of_a_reranker(tmp_path):
    for config, expected in [
        ({"true_token_id": 5, "false_token_id": 3, "module_input_name": "causal_logits"}, (5, 3)),
        ({"true_token_id": 5}, (5, None)),
    ]:
        write_modules(tmp_path, ("LogitScore", config))
        assert read_settings(tmp_path).answers == expected


def test_what_is_refused_by_name(tmp_path):
    pooled = ("Pooling", POOLING)
    for message, modules in [
        ("module 1, .*CNN", [("CNN", {})]),
        ("module 2, .*LayerNorm", [pooled, ("LayerNorm", {})]),
        ("module 2, .*Pooling", [pooled, pooled]),
        ("module 2, .*LogitScore", [pooled, ("LogitScore", {"true_token_id": 1})]),
        ("no Pooling", [("Normalize", None)]),
        ("include_prompt = false", [("Pooling", POOLING | {"include_prompt": False})]),
        ("pooling_mode = 'first'", [("Pooling", {"pooling_mode": "first"})]),
        ("the field new = 3", [("Pooling", POOLING | {"new": 3})]),
        (
            "module_input_name = 'token_embeddings'",
            [pooled, ("Dense", DENSE | {"module_input_name": "token_embeddings"})],
        ),
        ("module_output_name = 'scores'", [pooled, ("Normalize", {"module_output_name": "scores"})]),
        ("activation_function = 'my.Tanh'", [pooled, ("Dense", DENSE | {"activation_function": "my.Tanh"})]),
        ("torch.nn.Softplus", [pooled, ("Dense", DENSE | {"activation_function": "torch.nn.Softplus"})]),
        ("module_input_name = 'x'", [("LogitScore", {"true_token_id": 1, "module_input_name": "x"})]),
    ]:
        write_modules(tmp_path, *modules)
        with pytest.raises(NotImplementedError, match=message):
            read_settings(tmp_path)


def test_other_files_refuse_unknown_fields_unless_they_are_empty(tmp_path):
    prompts, texts = tmp_path / "config_sentence_transformers.json", tmp_path / "sentence_bert_config.json"
    for path, message, content in [
        (prompts, "the field rotate = 1", {"rotate": 1}),
        (prompts, "model_type = 'SparseEncoder'", {"model_type": "SparseEncoder"}),
        (texts, "the field query_length = 32", {"query_length": 32}),
        (texts, "transformer_task = 'fill-mask'", {"transformer_task": "fill-mask"}),
        (texts, "tokenizer_args = ", {"tokenizer_args": {"add_prefix_space": True}}),
        (texts, "processing_kwargs = ", {"processing_kwargs": {"text": {"max_length": 3}}}),
        (texts, 'modality_config without "text"', {"modality_config": {"image": {}}}),
        (texts, 'modality_config with "message"', {"modality_config": {"text": FORM, "message": FORM}}),
        (texts, r"modality_config\['text'\] = ", {"modality_config": {"text": FORM | {"method": "get_text_features"}}}),
        (texts, "method_output_name': 'logits'", {"transformer_task": ANSWERS, "modality_config": {"text": FORM}}),
        (texts, "module_output_name = 'sentence_embedding'", {"module_output_name": "sentence_embedding"}),
        (prompts, "similarity_fn_name = 'maxsim'", {"similarity_fn_name": "maxsim"}),
    ]:
        path.write_text(json.dumps(content))
        with pytest.raises(NotImplementedError, match=message):
            read_settings(tmp_path)
        path.unlink()
    write_json(prompts, {"rotate": None, "more": []})
    write_json(texts, {"modality_config": {"text": FORM, "image": {}}, "module_output_name": "token_embeddings"})
    assert read_settings(tmp_path) == EncodingSettings()
    loading = {"trust_remote_code": True, "add_pooling_layer": False, "unpad_inputs": True}
    write_json(
        texts,
        {"query_length": None, "model_args": loading, "tokenizer_args": {"padding_side": "left"}, "unpad_inputs": True},
    )
    assert read_settings(tmp_path) == EncodingSettings()


def test_damaged_values_name_their_file(tmp_path):
    pooled = ("Pooling", POOLING)
    for message, modules in [
        ("Dense/config.json: out_features must be an integer", [pooled, ("Dense", DENSE | {"out_features": "8"})]),
        ("Dense/config.json: bias must be true or false", [pooled, ("Dense", DENSE | {"bias": 1})]),
        ("true_token_id and false_token_id", [("LogitScore", {"true_token_id": -1})]),
    ]:
        write_modules(tmp_path, *modules)
        with pytest.raises(ValueError, match=message):
            read_settings(tmp_path)
    write_json(tmp_path / "modules.json", {"0": "Transformer"})
    with pytest.raises(ValueError, match="must hold a list of modules"):
        read_settings(tmp_path)
    escaping = {"idx": 0, "path": "../other", "type": "x.Transformer"}
    write_json(tmp_path / "modules.json", [escaping])
    with pytest.raises(ValueError, match="not a file name inside"):
        read_settings(tmp_path)
    (tmp_path / "modules.json").unlink()
    for content, message in [
        ({"prompts": ["a"]}, "prompts must map names to texts"),
        (
            {"prompts": {"a": "b"}, "default_prompt_name": "c"},
            r"default_prompt_name = 'c' is none of the prompts \(a\)",
        ),
        ({"truncate_dim": 0}, "truncate_dim must be an integer of at least 1"),
    ]:
        write_json(tmp_path / "config_sentence_transformers.json", content)
        with pytest.raises(ValueError, match=message):
            read_settings(tmp_path)
