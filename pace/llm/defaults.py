"""Default sampling settings, the same for Python, the command line and the server.

The checkpoint's generation_config.json decides. If it sets nothing, chats are sampled with `CHAT`, and plain text
is greedy.
"""

from __future__ import annotations

from pace.llm.configs import LEAST_TEMPERATURE, SamplingConfig

CHAT = SamplingConfig(temperature=0.7, top_p=0.9)
"""Sampling of chats if the checkpoint sets nothing."""
DRAWS = ("temperature", "top_k", "top_p", "min_p", "typical_p")
"""Fields that only affect sampling."""
_OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
"""Values that turn the filters off."""


def with_defaults(asked: SamplingConfig, checkpoint: SamplingConfig, is_chat: bool = False) -> SamplingConfig:
    """Returns a copy of `asked` in which unset fields come from `checkpoint`, or are the defaults. `do_sample` is
    always set."""
    config = asked.copy().merge_from(checkpoint)
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
    return True if any(name in said and getattr(config, name) != off for name, off in _OFF.items()) else None
