"""From what a user typed to what a model reads."""

from __future__ import annotations

import sys


def encode_chat(tokenizer, messages: list[dict[str, str]]) -> list[int]:
    """The token ids of a conversation by the tokenizer's own chat template, up to where the answer begins.

    Raises: ValueError where the tokenizer has no template.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError(
            "this tokenizer has no chat template, so the model was not made for conversations; give it plain text with `pace generate`"
        )
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)


def read_prompt(argument: str | None) -> str:
    """The prompt: the argument itself, or with `-` (or none at all, from a pipe) what stands on stdin.

    One newline at the end of stdin is dropped: `echo` adds it, nobody means it.
    Raises: ValueError where there is no prompt or it is not UTF-8.
    """
    if argument not in (None, "-"):
        return argument
    if argument is None and sys.stdin.isatty():
        raise ValueError("no prompt; give it as an argument, or `-` to read it from stdin")
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the prompt on stdin is not UTF-8: {error}") from None
    return text.removesuffix("\n").removesuffix("\r")
