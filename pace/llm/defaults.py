"""How tokens are picked where the caller does not say: one set of defaults for Python, the command line and the server.

The checkpoint's generation_config.json decides. Where it says nothing, chats are sampled as `CHAT` has it, and plain
text is continued greedily.
"""

from __future__ import annotations

from pace.llm.configs import LEAST_TEMPERATURE, SamplingConfig

CHAT = SamplingConfig(temperature=0.7, top_p=0.9)
"""How chats are sampled with a checkpoint that does not say."""
DRAWS = ("temperature", "top_k", "top_p", "min_p", "typical_p")
"""Fields that change a draw, and nothing else."""
_OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
"""Values of filters that keep all tokens."""


def with_defaults(asked: SamplingConfig, checkpoint: SamplingConfig, is_chat: bool = False) -> SamplingConfig:
    """A copy of `asked` in which fields that it leaves open are those of `checkpoint`, or the defaults. `do_sample` is
    always set in it."""
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
    """Whether a config asks for samples: by `do_sample`, or else by a temperature (0 is greedy) or a filter. None where it
    says nothing."""
    said = config.explicit_fields
    if "do_sample" in said:
        return config.do_sample
    if "temperature" in said:
        return config.temperature >= LEAST_TEMPERATURE
    return True if any(name in said and getattr(config, name) != off for name, off in _OFF.items()) else None
