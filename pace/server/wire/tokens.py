"""Answers about tokens, for clients of vLLM, llama.cpp and lm-eval's remote tokenizer. Run in workers, like all
tokenizing."""

from __future__ import annotations

from typing import Any

from pace.llm.text.token_bytes import TokenBytes
from pace.server.errors import invalid
from pace.server.jobs import ChatPrompt
from pace.server.limits import Limits
from pace.server.prompts import PromptReader
from pace.server.schemas.chat import ChatRequest
from pace.server.schemas.tokens import DetokenizeRequest, TokenizeRequest


def tokenize(request: TokenizeRequest, reader: PromptReader, limits: Limits) -> dict[str, Any]:
    """Answers `POST /tokenize`."""
    given = request.input(limits)
    if isinstance(given, ChatPrompt):
        tokens = reader.encode_chat(given, request.adds_special_tokens)
    else:
        tokens = reader.encode(given, request.adds_special_tokens)
    names = reader.tokenizer.convert_ids_to_tokens(tokens) if request.return_token_strs else None
    return {
        "tokens": _pieces(tokens, reader.tokenizer) if request.with_pieces else tokens,
        "count": len(tokens),
        "max_model_len": reader.max_length,
        "token_strs": names,
    }


def detokenize(request: DetokenizeRequest, reader: PromptReader, limits: Limits) -> dict[str, str]:
    """Answers `POST /detokenize`: the text under vLLM's name and llama.cpp's."""
    size = len(reader.tokenizer)
    wrong = next((token for token in request.tokens if not 0 <= token < size), None)
    if wrong is not None:
        raise invalid("tokens", f"must be from 0 to {size - 1}, got {wrong}")
    text = reader.tokenizer.decode(request.tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return {"prompt": text, "content": text}


def tokenizer_info(reader: PromptReader) -> dict[str, Any]:
    """Answers `GET /tokenizer_info`."""
    tokenizer = reader.tokenizer
    return {
        "tokenizer_class": getattr(tokenizer, "tokenizer_class", None) or type(tokenizer).__name__,
        "vocab_size": len(tokenizer),
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "pad_token": tokenizer.pad_token,
        "unk_token": tokenizer.unk_token,
        "chat_template": tokenizer.chat_template,
        "model_max_length": reader.max_length,
        "max_model_len": reader.max_length,
    }


def apply_template(request: ChatRequest, reader: PromptReader, limits: Limits) -> dict[str, str]:
    """Answers llama.cpp's `POST /apply-template`: the prompt of a chat request."""
    return {"prompt": reader.render(request.to_prompt(limits))}


def count(request: Any, reader: PromptReader, limits: Limits) -> dict[str, Any]:
    """Returns the number of tokens of a conversation's prompt."""
    return {"input_tokens": len(reader.encode_chat(request.to_prompt(limits)))}


def count_response(request: Any, reader: PromptReader, limits: Limits) -> dict[str, Any]:
    return {"object": "response.input_tokens", **count(request, reader, limits)}


def _pieces(tokens: list[int], tokenizer: Any) -> list[dict[str, Any]]:
    """Returns tokens in llama.cpp's form: a piece is a text, or bytes if they are no whole characters."""
    table = TokenBytes.of(tokenizer)
    pieces = []
    for token in tokens:
        data = table[token]
        try:
            pieces.append({"id": token, "piece": data.decode()})
        except UnicodeDecodeError:
            pieces.append({"id": token, "piece": list(data)})
    return pieces
