"""Default sampling settings, the same for Python, the command line and the server.

The checkpoint's generation_config.json decides. If it sets nothing, chats are sampled with `CHAT`, and plain text
is greedy.
"""

from __future__ import annotations

from pace.llm.configs import MIN_TEMPERATURE, WITHOUT_EFFECT, SamplingConfig

CHAT = SamplingConfig(temperature=0.7, top_p=0.9)
"""Sampling of chats if the checkpoint sets nothing."""


def with_defaults(asked: SamplingConfig, checkpoint: SamplingConfig, is_chat: bool = False) -> SamplingConfig:
    """Returns a copy of `asked` in which unset fields come from `checkpoint`, or are the defaults. `do_sample` is
    always set. Beam search in a chat has the defaults of plain text, because it looks for the most likely answer."""
    config = asked.copy().merge_from(checkpoint)
    is_chat = is_chat and config.num_beams == 1
    if is_chat:
        if samples(checkpoint) is None:
            config.merge_from(CHAT)
        if "top_k" not in config.explicit_fields:
            config.top_k = 0
    if "do_sample" not in asked.explicit_fields:
        said = next((wish for wish in map(samples, (asked, checkpoint)) if wish is not None), is_chat)
        config.do_sample = said and config.temperature >= MIN_TEMPERATURE
    return config


def end_tokens_of(config: SamplingConfig) -> list[int]:
    """Returns the tokens that end a sequence."""
    return [] if config.ignore_eos or config.eos_token_id is None else config.eos_token_id


def pad_token_of(config: SamplingConfig) -> int:
    """Returns the token that pads outputs: the config's, or the first end token, or 0."""
    return config.pad_token_id if config.pad_token_id is not None else [*(config.eos_token_id or ()), 0][0]


def samples(config: SamplingConfig) -> bool | None:
    """True if a config asks for sampling: by `do_sample`, or else by a temperature (0 is greedy) or a filter. None if
    it sets none of them."""
    said = config.explicit_fields
    if "do_sample" in said:
        return config.do_sample
    if "temperature" in said:
        return config.temperature >= MIN_TEMPERATURE
    return True if any(name in said and getattr(config, name) != off for name, off in WITHOUT_EFFECT.items()) else None
