"""The tokenizers package's object for what stands in a tokenizer.json, made without writing that JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import groupby
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE

State = Mapping[str, Any]
"""A tokenizer.json as Python has it. Its model is of the type BPE, with `vocab` a dict and `merges` a list of pairs."""


def make_backend(state: State | str) -> Tokenizer:
    """The tokenizer that a `State` describes, or the text of a tokenizer.json. A vocabulary of 262,000 tokens takes a
    third of the time that its JSON would."""
    if isinstance(state, str):
        return Tokenizer.from_str(state)
    model = dict(state["model"])
    vocab, merges = model.pop("vocab"), model.pop("merges")
    small = {"version": "1.0", "truncation": None, "padding": None, **state, "added_tokens": []}
    backend = Tokenizer.from_str(json.dumps(small | {"model": model | {"vocab": {}, "merges": [], "unk_token": None}}))
    kind = model.pop("type")
    if kind != "BPE":
        raise ValueError(f"tokenizers are made of BPE models; got {kind!r}")
    options = {name: value for name, value in model.items() if value is not None}
    backend.model = BPE(vocab, list(map(tuple, merges)) if merges and type(merges[0]) is list else merges, **options)
    for special, tokens in groupby(state.get("added_tokens") or (), key=lambda token: token["special"]):
        found = [AddedToken(**{name: token[name] for name in token if name != "id"}) for token in tokens]
        (backend.add_special_tokens if special else backend.add_tokens)(found)
    return backend
