"""Default sampling settings, the same for Python, the command line and the server.

The checkpoint's generation_config.json decides. If it sets nothing, chats are sampled with `CHAT`, and plain text
is greedy.
"""

from __future__ import annotations

from pace.llm.configs import LEAST_TEMPERATURE, WITHOUT_EFFECT, SamplingConfig

CHAT = SamplingConfig(temperature=0.7, top_p=0.9)
"""Sampling of chats if the checkpoint sets nothing."""


def with_defaults(asked: SamplingConfig, checkpoint: SamplingConfig, is_chat: bool = False) -> SamplingConfig:
    """Returns a copy of `asked` in which unset fields come from `checkpoint`, or are the defaults. `do_sample` is
    always set. Beam search has the defaults of plain text in a chat, too: it looks for the most likely answer."""
    config = asked.copy().merge_from(checkpoint)
    is_chat = is_chat and config.num_beams == 1
    if is_chat:
        if samples(checkpoint) is None:
            config.merge_from(CHAT)
        if "top_k" not in config.explicit_fields:
            config.top_k = 0
    if "do_sample" not in asked.explicit_fields:
        said = next((wish for wish in map(samples, (asked, checkpoint)) if wish is not None), is_chat)
        config.do_sample = said and config.temperature >= LEAST_TEMPERATURE
    return config


def samples(config: SamplingConfig) -> bool | None:
    """True if a config asks for sampling: by `do_sample`, or else by a temperature (0 is greedy) or a filter. None if
    it sets none of them."""
    said = config.explicit_fields
    if "do_sample" in said:
        return config.do_sample
    if "temperature" in said:
        return config.temperature >= LEAST_TEMPERATURE
    return True if any(name in said and getattr(config, name) != off for name, off in WITHOUT_EFFECT.items()) else None
