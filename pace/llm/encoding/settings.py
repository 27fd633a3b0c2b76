"""Reads the files of sentence-transformers in a checkpoint: what is done before and after its model.

    modules.json                         the modules, in order
    config_sentence_transformers.json    prompts, the default prompt, dimensions
    sentence_bert_config.json            the maximum length of a text, lower case
    1_Pooling/config.json  2_Dense/...   settings and weights of a module

Anything that is not implemented and would change a result is refused by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pace.checkpoints.files import (
    MAX_CONFIG_BYTES,
    asks_for_nothing,
    file_inside,
    parse_json,
    read_json_object,
    read_whole,
)
from pace.llm.encoding.embedder import Pooling
from pace.naming import shown
from pace.ops.pooling import POOLINGS

MODULES_FILE = "modules.json"
PROMPTS_FILE = "config_sentence_transformers.json"
TEXT_FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Names of the file about texts; the first that exists counts."""

ACTIVATIONS = {"Identity": None, "Tanh": "tanh", "GELU": "gelu", "ReLU": "relu", "SiLU": "silu"}
"""Class of torch.nn -> name in `pace.ops`."""
OLD_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Field of an older Pooling -> name, in the order of concatenation."""
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
ANSWERS = "text-generation"
"""Task of a model that is asked for yes or no."""
OUTPUTS = {
    "feature-extraction": ("last_hidden_state", "token_embeddings"),
    "sequence-classification": ("logits", "scores"),
    ANSWERS: ("logits", "causal_logits"),
}
"""Task of a model -> what its forward pass returns, and the name of that for the next module."""
OF_TOKENS = {"padding", "truncation", "max_length", "return_tensors", "tokenize", "return_dict"}
"""Arguments of a chat template that are not its variables."""
LOADING_FIELDS = {
    *("trust_remote_code", "torch_dtype", "dtype", "attn_implementation", "use_cache", "use_flash_attn"),
    *("add_pooling_layer", "low_cpu_mem_usage", "padding_side", "unpad_inputs", "use_memory_efficient_attention"),
    *("default_task", "lora_main_params_trainable"),
}
"""Arguments of loading a model or tokenizer that change no result, and `default_task`."""


@dataclass(frozen=True)
class DenseSettings:
    """A matrix after pooling: `activation(x W' + b)`, plus x or its projection with `residual`."""

    folder: Path
    in_features: int
    out_features: int
    bias: bool
    activation: str | None
    """Name in `pace.ops`."""
    residual: bool


@dataclass(frozen=True)
class Normalise:
    """Divides each row by its length."""


AfterPooling = DenseSettings | Normalise


@dataclass(frozen=True)
class PairTemplate:
    """How a chat template writes a query and a document."""

    is_flat: bool = True
    """True if the content of a message is a text, False for a list of parts."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template."""


@dataclass(frozen=True)
class EncodingSettings:
    """What a checkpoint says about texts and vectors, next to its model."""

    pooling: Pooling | None = None
    """None if it does not say."""
    pooled_size: int | None = None
    """Width of the model's rows that the pooling was made for."""
    after: tuple[AfterPooling, ...] = ()
    """What is done with pooled rows, in order."""
    answers: tuple[int, int | None] | None = None
    """Ids of the tokens whose logits are the score of a pair: the first less the second, if there is one."""
    asks: bool = False
    """True if a classifier scores pairs in the prompt of Qwen3-Reranker."""
    pair_template: PairTemplate | None = None
    """What writes the pairs of `answers`, in place of the prompt of Qwen3-Reranker."""
    has_plain_pairs: bool = False
    """True if pairs of `answers` are written as for a classifier."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    pair_prompt: str = ""
    """Text before the first text of each pair of a cross-encoder; for a model that answers yes or no, its task."""
    similarity: str = "cosine"
    """One of `SIMILARITIES`: how vectors are compared."""
    truncate_dim: int | None = None
    """Dimensions of a vector, if fewer than the modules give."""
    max_length: int | None = None
    """Maximum number of tokens of a text."""
    lower_case: bool = False
    default_task: str | None = None
    """Task of the adapter of texts that name none."""

    @property
    def normalises(self) -> bool:
        """True if vectors have length 1."""
        return bool(self.after) and isinstance(self.after[-1], Normalise)


def read_settings(directory: Path) -> EncodingSettings:
    """Reads the settings of a checkpoint directory; the defaults where it has no such files.

    Raises ValueError for damaged files and invalid values, NotImplementedError for modules and fields that are not
    implemented."""
    fields: dict[str, Any] = {}
    if (directory / MODULES_FILE).is_file():
        fields |= _read_modules(directory)
    if (path := directory / PROMPTS_FILE).is_file():
        fields |= _read_prompts(path)
    if path := next((path for name in TEXT_FILES if (path := directory / name).is_file()), None):
        fields |= _read_texts(path)
    return EncodingSettings(**fields)


# -- modules -----------------------------------------------------------------------------------------------------------


def _read_modules(directory: Path) -> dict[str, Any]:
    """The fields of `EncodingSettings` that modules.json decides. The first module is the model itself."""
    path = directory / MODULES_FILE
    modules = parse_json(read_whole(path, MAX_CONFIG_BYTES), str(path))
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ValueError(f"{path} must hold a list of modules")
    fields: dict[str, Any] = {}
    after: list[AfterPooling] = []
    for number, module in enumerate(modules):
        kind = str(module.get("type")).rpartition(".")[2]
        where = module.get("path") or ""
        folder = file_inside(directory, where, f"{path}: the path of module {number}") if where else directory
        if kind == "Transformer":
            if number or where:
                raise NotImplementedError(f"{path}: the Transformer must be the first module, with an empty path")
        elif number and kind == "Pooling" and not fields and not after:
            fields |= _read_pooling(folder / "config.json")
        elif number and kind == "Dense":
            after.append(_read_dense(folder))
        elif number and kind == "Normalize":
            config = _read_fields(folder / "config.json", _IN_AND_OUT, optional=True)
            _check_in_and_out(folder / "config.json", config)
            after.append(Normalise())
        elif kind == "LogitScore" and number == len(modules) - 1 == 1:
            fields |= {"answers": _read_answers(folder / "config.json")}
        else:
            raise NotImplementedError(
                f"{path}: module {number}, {shown(kind)}, is not implemented in this place; implemented: Transformer, "
                "then Pooling, Dense and Normalize, or LogitScore"
            )
    if after and "pooling" not in fields:
        raise NotImplementedError(f"{path} has no Pooling; vectors of single tokens are not implemented")
    return fields | {"after": tuple(after)}


_IN_AND_OUT = ("module_input_name", "module_output_name")


def _check_in_and_out(path: Path, config: Mapping[str, Any]) -> None:
    """Raises NotImplementedError unless a module changes the pooled rows."""
    for name in _IN_AND_OUT:
        if config.get(name) not in (None, "sentence_embedding"):
            raise NotImplementedError(
                f'{path}: {name} = {shown(config[name])} is not implemented; "sentence_embedding" is'
            )


def _read_pooling(path: Path) -> dict[str, Any]:
    sizes = ("embedding_dimension", "word_embedding_dimension")
    config = _read_fields(path, (*sizes, "pooling_mode", "include_prompt", *OLD_POOLINGS))
    if config.get("include_prompt") is False:
        raise NotImplementedError(f"{path}: include_prompt = false is not implemented; all tokens of a text are pooled")
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [name for old, name in OLD_POOLINGS.items() if config.get(old)] or ["mean"]
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or not modes or not all(mode in POOLINGS for mode in modes):
        raise NotImplementedError(
            f"{path}: pooling_mode = {shown(config.get('pooling_mode'))} is not implemented; implemented: "
            f"{', '.join(POOLINGS)}, and lists of them"
        )
    size = next((config[name] for name in sizes if config.get(name) is not None), None)
    return {"pooling": tuple(modes), "pooled_size": None if size is None else _count(path, sizes[0], size)}


def _read_dense(folder: Path) -> DenseSettings:
    path = folder / "config.json"
    known = ("in_features", "out_features", "bias", "activation_function", "use_residual", *_IN_AND_OUT)
    config = _read_fields(path, known)
    _check_in_and_out(path, config)
    activation = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    library, _, name = str(activation).rpartition(".")
    if not library.startswith("torch.nn") or name not in ACTIVATIONS:
        raise NotImplementedError(
            f"{path}: activation_function = {shown(activation)} is not implemented; implemented: "
            f"{', '.join(ACTIVATIONS)} of torch.nn"
        )
    return DenseSettings(
        folder,
        _count(path, "in_features", config.get("in_features")),
        _count(path, "out_features", config.get("out_features")),
        _flag(path, "bias", config.get("bias", True)),
        ACTIVATIONS[name],
        _flag(path, "use_residual", config.get("use_residual") or False),
    )


def _read_answers(path: Path) -> tuple[int, int | None]:
    config = _read_fields(path, ("true_token_id", "false_token_id", "module_input_name"))
    if config.get("module_input_name", "causal_logits") != "causal_logits":
        raise NotImplementedError(
            f'{path}: module_input_name = {shown(config["module_input_name"])} is not implemented; "causal_logits" is'
        )
    ids = [config.get(name) for name in ("true_token_id", "false_token_id")]
    if type(ids[0]) is not int or type(ids[1]) not in (int, type(None)) or min(ids[0], ids[1] or 0) < 0:
        raise ValueError(f"{path}: true_token_id and false_token_id must be token ids; got {shown(ids)}")
    return ids[0], ids[1]


# -- prompts and texts -------------------------------------------------------------------------------------------------


def _read_prompts(path: Path) -> dict[str, Any]:
    known = ("__version__", "model_type", "prompts", "default_prompt_name", "similarity_fn_name", "truncate_dim")
    config = _read_fields(path, (*known, "activation_fn", "keep_in_fp32_modules"))
    kind = config.get("model_type", "SentenceTransformer")
    if kind not in ("SentenceTransformer", "CrossEncoder"):
        raise NotImplementedError(
            f"{path}: model_type = {shown(kind)} is not implemented; SentenceTransformer and CrossEncoder are"
        )
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise ValueError(f"{path}: prompts must map names to texts; got {shown(prompts)}")
    default = config.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise ValueError(
            f"{path}: default_prompt_name = {shown(default)} is none of the prompts ({', '.join(prompts) or 'none'})"
        )
    similarity = config.get("similarity_fn_name") or SIMILARITIES[0]
    if similarity not in SIMILARITIES:
        raise NotImplementedError(
            f"{path}: similarity_fn_name = {shown(similarity)} is not implemented; implemented: "
            f"{', '.join(SIMILARITIES)}"
        )
    size = config.get("truncate_dim")
    return {
        "prompts": {name: text or "" for name, text in prompts.items()},
        "default_prompt_name": default,
        "pair_prompt": kind == "CrossEncoder" and prompts.get(default) or "",
        "similarity": similarity,
        "truncate_dim": None if size is None else _count(path, "truncate_dim", size),
    }


def _read_texts(path: Path) -> dict[str, Any]:
    loading = ("model_args", "model_kwargs", "tokenizer_args", "processor_kwargs", "config_args", "config_kwargs")
    known = ("max_seq_length", "do_lower_case", "transformer_task", "modality_config", "module_output_name")
    config = _read_fields(path, (*known, "unpad_inputs", "processing_kwargs", *loading))
    for name in loading:
        given = config.get(name) or {}
        if not isinstance(given, dict) or given.keys() - LOADING_FIELDS:
            raise NotImplementedError(f"{path}: {name} = {shown(given)} is not implemented")
    default_task = next((task for name in loading if (task := (config.get(name) or {}).get("default_task"))), None)
    if not isinstance(default_task, str | None):
        raise ValueError(f"{path}: default_task must be the name of a task; got {shown(default_task)}")
    task = config.get("transformer_task", "feature-extraction")
    if task not in OUTPUTS:
        raise NotImplementedError(
            f"{path}: transformer_task = {shown(task)} is not implemented; implemented: {', '.join(OUTPUTS)}"
        )
    forms = _read_forms(path, task, config)
    length = config.get("max_seq_length")
    return {
        "max_length": None if length is None else _count(path, "max_seq_length", length),
        "lower_case": _flag(path, "do_lower_case", config.get("do_lower_case") or False),
        "default_task": default_task,
        **(_read_pair_form(path, forms, config) if task == ANSWERS else {}),
    }


def _read_forms(path: Path, task: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `modality_config`. Raises NotImplementedError unless the next module gets what the model usually returns,
    for texts as they are. For ANSWERS, a chat template may write them."""
    output, name = OUTPUTS[task]
    usual = {"method": "forward", "method_output_name": output}
    if (given := config.get("module_output_name")) not in (None, name):
        raise NotImplementedError(f'{path}: module_output_name = {shown(given)} is not implemented; "{name}" is')
    forms = config.get("modality_config")
    forms = {"text": usual} if forms is None else forms
    if not isinstance(forms, dict) or not (forms.keys() & {"text", "message"}):
        raise NotImplementedError(f'{path}: modality_config without "text" is not implemented; got {shown(forms)}')
    for kind in forms.keys() & {"text", "message"}:
        form = forms[kind]
        if not isinstance(form, dict) or any(form.get(key) != value for key, value in usual.items()):
            raise NotImplementedError(
                f"{path}: modality_config[{shown(kind)}] = {shown(form)} is not implemented; {usual} is"
            )
    if task == ANSWERS:
        return forms
    if "message" in forms:
        raise NotImplementedError(
            f'{path}: modality_config with "message" is not implemented: it puts texts into a chat template; take it '
            "out of the file to embed texts as they are"
        )
    if config.get("processing_kwargs"):
        raise NotImplementedError(
            f"{path}: processing_kwargs = {shown(config['processing_kwargs'])} is not implemented"
        )
    return forms


def _read_pair_form(path: Path, forms: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `EncodingSettings` about the pairs of a model that answers."""
    given = config.get("processing_kwargs") or {}
    variables = given.get("chat_template") or {} if isinstance(given, dict) else None
    if not isinstance(variables, dict) or given.keys() - {"chat_template"} or variables.keys() & OF_TOKENS:
        raise NotImplementedError(f"{path}: processing_kwargs = {shown(given)} is not implemented")
    if "message" not in forms:
        return {"has_plain_pairs": True}
    return {"pair_template": PairTemplate(forms["message"].get("format") != "structured", variables)}


# -- fields ------------------------------------------------------------------------------------------------------------


def _read_fields(path: Path, known: Collection[str], optional: bool = False) -> dict[str, Any]:
    """Reads a small JSON file; {} if an `optional` one is missing. Raises NotImplementedError for an unknown field,
    unless it is null, false or empty."""
    if optional and not path.is_file():
        return {}
    config = read_json_object(path)
    unknown = [name for name, value in config.items() if name not in known and not asks_for_nothing(value)]
    if unknown:
        raise NotImplementedError(
            f"{path}: the field {unknown[0]} = {shown(config[unknown[0]])} is not implemented; known fields: "
            f"{', '.join(known)}"
        )
    return config


def _count(path: Path, name: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value < 2**31:
        raise ValueError(f"{path}: {name} must be an integer of at least 1; got {shown(value)}")
    return value


def _flag(path: Path, name: str, value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(f"{path}: {name} must be true or false; got {shown(value)}")
    return value
