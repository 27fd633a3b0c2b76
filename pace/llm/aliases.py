"""Other tools' names for pace's options. A name with the same meaning is accepted; for any other, the error says what
to use. The aliases of `SamplingConfig` are in its fields."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pace.naming import meant

SAMPLING_ADVICE = {
    "best_of": "num_return_sequences with logprobs gives several texts to choose from",
    "stop_token_ids": "eos_token_id takes the place of the checkpoint's end tokens",
    "stopping_criteria": "stop_strings, or a step_callback, may end a text",
    "repeat_penalty": "repetition_penalty is the same over the whole prompt and output",
    "num_predict": "max_new_tokens bounds the generated tokens",
    "n_predict": "max_new_tokens bounds the generated tokens",
    "num_ctx": "max_seq_len of LLMModel bounds prompt and output",
    "guided_json": "json_schema is the schema",
    "guided_regex": "regex is the expression",
    "guided_choice": "choices are the texts",
    "guided_grammar": "grammar is the grammar",
    "use_beam_search": "num_beams above 1 is beam search",
    "assistant_model": "spec_config=DraftModelConfig(...) of LLMModel drafts",
    "prompt_lookup_num_tokens": "spec_config=PromptLookupConfig(...) of LLMModel drafts from the prompt",
    "input_ids": "give the tokenizer's output as it is: generate(inputs)",
    "attention_mask": "give the tokenizer's output as it is: generate(inputs)",
    "lora_request": "adapter names an adapter that load_adapter has loaded",
    "stream": "LLMModel.stream gives the text in pieces",
    "messages": "LLMModel.chat takes messages",
    "echo": "output_token_ids of the output hold the prompt, too",
    "output_scores": "logprobs=K gives log-probabilities",
    "return_dict_in_generate": "an output always has all of its parts",
    "use_cache": "keys and values are always kept",
    "return_audio": "pace generates text and no speech, so leave it out",
    "speaker": "pace generates text and no speech, so leave it out",
    "use_audio_in_video": "video is not supported as input, so leave it out",
    "reasoning_budget": "thinking_budget bounds the tokens of a thought",
    "budget_tokens": "thinking_budget bounds the tokens of a thought",
    "enable_thinking": "template_variables={'enable_thinking': ...} of LLMModel.chat sets it",
    "reasoning_effort": "template_variables={'reasoning_effort': ...} of LLMModel.chat sets it",
    "thinker_max_new_tokens": "max_new_tokens bounds the generated tokens",
}
NOT_IMPLEMENTED = (
    "min_length forced_bos_token_id forced_eos_token_id begin_suppress_tokens sequence_bias "
    "guidance_scale penalty_alpha epsilon_cutoff eta_cutoff top_h encoder_repetition_penalty "
    "encoder_no_repeat_ngram_size exponential_decay_length_penalty num_beam_groups diversity_penalty constraints "
    "force_words_ids watermarking_config max_time dola_layers"
).split()
"""Fields of HF's GenerationConfig that change the text and are not implemented."""
_NEUTRAL = (None, False, 0, 1, [], {})

MODEL = {"torch_dtype": "dtype", "max_model_len": "max_seq_len", "n_ctx": "max_seq_len", "n_threads": "num_threads"}
"""Names that mean the same as these options of LLMModel."""
MODEL_ADVICE = {
    "attn_implementation": "backend chooses between kernels and torch",
    "quantization_config": "quantization takes a format's name, or a BitsAndBytesConfig",
    "gpu_memory_utilization": "kv_cache_bytes bounds keys and values",
    "model": "the model is the first argument",
    "tokenizer": "tokenizer_name_or_path says where it is",
    "low_cpu_mem_usage": "a checkpoint is never in memory twice",
    "use_safetensors": "safetensors files are preferred",
    "draft_model": "spec_config=DraftModelConfig(...) drafts",
    "assistant_model": "spec_config=DraftModelConfig(...) drafts",
}


def unsupported(values: Mapping[str, Any]) -> list[str]:
    """Unimplemented fields of a GenerationConfig that would change the text."""
    return [name for name in NOT_IMPLEMENTED if values.get(name) not in _NEUTRAL]


def model_options(given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Translates other tools' options of a model. Omits options that ask for what always holds: the CPU as device, and
    no code from the checkpoint.

    Raises TypeError for an unknown option, ValueError for another device or for remote code."""
    options = {}
    for name, value in given.items():
        if name in ("device", "device_map"):
            if str(value) not in ("cpu", "auto", "None"):
                raise ValueError(f"{name}={value!r}: pace only runs on the CPU; leave it out")
        elif name == "trust_remote_code":
            if value:
                raise ValueError("trust_remote_code=True: pace runs no code that comes with a checkpoint; leave it out")
        else:
            option = translated("LLMModel has no option", name, MODEL, MODEL_ADVICE, known)
            if option in options:
                raise TypeError(f"{option} is given by two names ({', '.join(given)}); give it once")
            options[option] = value
    return options


def translated(
    problem: str, name: str, same: Mapping[str, str], advice: Mapping[str, str], known: Collection[str]
) -> str:
    """Returns pace's name of an option: `same` has the aliases. Raises TypeError with the advice for any other name."""
    if name in same:
        return same[name]
    if name in advice:
        raise TypeError(f"{problem} {name!r}; {advice[name]}")
    raise TypeError(f"{problem} {name!r}{meant(name, known)} Known: {', '.join(known)}")
