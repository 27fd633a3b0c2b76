"""All limits of requests, in one table. They are checked before anything is allocated in proportion to a request."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from pace.grammar import GrammarLimits

MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """Limits of requests and connections. Sizes are in bytes, times in seconds."""

    body_bytes: int = 4 * MIB
    """Size of a request for a model of text, and of the other parts of a request with images or sound."""
    media_body_bytes: int = 32 * MIB
    """Size of a request for a model that takes images or sound."""
    large_body_bytes: int = 1024 * MIB
    """Size of all requests in progress together that are larger than `body_bytes`."""
    images: int = 16
    """Images of one request."""
    clips: int = 4
    """Clips of sound of one request."""
    media_bytes: int = 20 * MIB
    """Size of one image or clip, before it is decoded."""
    media_seconds: float = 60.0
    """Maximum time to decode the images and sound of a request, waiting included."""
    media_tokens: int = 1 << 15
    """Tokens of decoded images and sound of all requests in progress. One takes up to 24 KiB."""
    header_bytes: int = 32 << 10
    header_lines: int = 100
    header_seconds: float = 10.0
    """Maximum time from the first byte of a request until its headers are complete."""
    body_seconds: float = 60.0
    write_seconds: float = 60.0
    """Time without progress after which a reading client is disconnected."""
    connections: int = 1024
    max_queue: int | None = None
    """Requests waiting for a place; None for four times the sequences that run at once."""
    max_wait: float = 60.0
    """Maximum estimated waiting time of a request, in seconds; also how long it waits for its model to be loaded."""
    max_per_key: int | None = None
    """Requests of one key at once; None for no limit."""
    json_depth: int = 128
    messages: int = 4096
    parts: int = 4096
    """Parts of one message's content. A body of the default size holds 30 times this number of the shortest parts."""
    template_kwargs: int = 16
    prompts: int = 1024
    """Prompts of one request, times its `n`."""
    inputs: int = 2048
    """Texts of one request for vectors, scores or labels."""
    input_tokens: int = 300_000
    """Tokens of all texts of such a request together."""
    n: int = 128
    """Continuations of a prompt; also limits `best_of`."""
    stop_strings: int = 64
    stop_characters: int = 256
    top_logprobs: int = 20
    token_lists: int = 1024
    """Entries of `logit_bias`, `bad_words`, `stop_token_ids` and `allowed_token_ids`."""
    adapters: int = 16
    """Adapters of one request."""
    tools: int = 128
    """Tools of a request; their schemas together have the limits of a grammar."""
    grammar_bytes: int = 256 << 10
    """Maximum bytes of a grammar, a schema, or all choices together."""
    grammar_depth: int = 64
    """Maximum nesting of brackets or schemas."""
    grammar_schemas: int = 4096
    """Maximum number of schemas within one schema."""
    grammar_choices: int = 16384
    grammar_seconds: float = 10.0
    """Maximum time to compile one grammar, waiting included."""
    grammar_cache_bytes: int = 64 * MIB
    """Bytes of compiled grammars that are cached."""
    name_characters: int = 128
    """Maximum length of a request id, a model name, and a salt."""
    prefixes: int = 1024
    """Kept prefixes of all clients."""
    prefix_bytes: int = 16 * 1024 * MIB
    """Bytes of kept prefixes of all clients."""
    bytes_per_token: int = 16
    """A text of more bytes than this for each token of the context is refused unread."""
    drain_seconds: float = 30.0
    """Time that requests have to finish when the server is stopped."""

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError that names the limit."""
        for name, value in asdict(self).items():
            if value is None and name in ("max_queue", "max_per_key"):
                continue
            is_time = name.endswith("_seconds") or name == "max_wait"
            if isinstance(value, bool) or not isinstance(value, (int, float) if is_time else int):
                raise TypeError(f"{name} must be a {'number' if is_time else 'whole number'}; got {value!r}")
            least = 0 if name in ("max_queue", "max_wait", "drain_seconds") else 1
            if is_time and least:
                if not 0 < value < math.inf:
                    raise ValueError(f"{name} must be a number of seconds above 0; got {value!r}")
            elif not least <= value < math.inf:
                raise ValueError(f"{name} must be at least {least}; got {value!r}")

    @property
    def grammar(self) -> GrammarLimits:
        """Limits of grammars."""
        return GrammarLimits(self.grammar_bytes, self.grammar_depth, self.grammar_schemas, self.grammar_choices)

    def shown(self) -> dict[str, Any]:
        """Returns the limits as in `GET /limits`."""
        return asdict(self)

    @classmethod
    def names(cls) -> list[str]:
        return [field.name for field in fields(cls)]
