"""Chat templates: Jinja in a sandbox, with the names that transformers gives templates.

A template comes from the Hub. It gets only plain data, which it can neither change nor use to reach Python's internals,
and it renders text. Source: transformers/utils/chat_template_utils.py, the reference in the tests."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import TemplateError, ext, meta, nodes, utils
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

MIN_JINJA = (3, 1, 6)
"""Templates could escape the sandbox of earlier versions."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which clients give a message's reasoning. Templates read the first; the template of gpt-oss reads the
second."""
MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""Appended to the content of the message to continue. A template that strips the message also strips the mark's final
space."""


def render(
    template: str,
    messages: Sequence[Any],
    tools: Sequence[Any] | None = None,
    documents: Sequence[Any] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    **variables: Any,
) -> str:
    """Renders a conversation as text. With `continue_final_message` the text ends where the last message's content
    ends.

    Raises jinja2's TemplateError for errors in or by the template, and ValueError for a message that cannot be
    continued. Raises TypeError for messages that are not dicts."""
    _check_version(jinja2.__version__)
    compiled = _compile(template)
    plain = [_message(message) for message in messages]
    if not plain:
        raise ValueError("a conversation has one message at least")
    if continue_final_message and add_generation_prompt:
        raise ValueError("continue_final_message and add_generation_prompt exclude each other")
    final = _mark(plain, template) if continue_final_message else None
    text = compiled.render(
        messages=plain,
        tools=_plain(tools),
        documents=_plain(documents),
        add_generation_prompt=add_generation_prompt,
        **_plain(variables),
    )
    return text if final is None else _up_to_mark(text, final)


def variables_of(template: str) -> frozenset[str]:
    """Names of the variables that a template reads. Raises jinja2's TemplateError for a template that is not Jinja."""
    return frozenset(meta.find_undeclared_variables(_compile(template).environment.parse(template)))


def literals_of(template: str) -> str:
    """The text that a template itself has: its raw text and its strings, with NUL between them."""
    tree = _compile(template).environment.parse(template)
    texts = {node.data for node in tree.find_all(nodes.TemplateData)}
    texts |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return "\0".join(texts)


def _mark(messages: list[dict[str, Any]], template: str) -> str:
    """Appends the mark to the last message's content, and returns the original content."""
    last = messages[-1]
    content = last.get("content")
    if content is None:
        raise ValueError("continue_final_message is set, but the last message has no content to go on with")
    if "content" not in template:
        raise ValueError("continue_final_message is set, but the chat template does not read the content of messages")
    if isinstance(content, str):
        last["content"] = content + MARK
        return content
    for part in reversed(content):
        if "text" in part:
            text, part["text"] = part["text"], part["text"] + MARK
            return text
    raise ValueError("continue_final_message is set, but the last message has no text to go on with")


def _up_to_mark(text: str, final: str) -> str:
    if final.strip() not in text or MARK.strip() not in text:
        raise ValueError("continue_final_message is set, but the chat template leaves the last message out, or a part")
    at = text.rindex(MARK.strip())
    return text[:at] if text.startswith(MARK, at) else text[:at].rstrip()


def _message(message: Any) -> dict[str, Any]:
    """Converts a message for templates: plain data, no keys with value None, reasoning under all names that templates
    read."""
    plain = _plain(message)
    if not isinstance(plain, dict):
        raise TypeError(f"messages must be dicts; got {message!r:.100}")
    plain = {key: value for key, value in plain.items() if value is not None}
    thoughts = next((plain[name] for name in REASONING if name in plain), None)
    return plain if thoughts is None else {"thinking": thoughts, **plain, "reasoning_content": thoughts}


def _plain(value: Any) -> Any:
    """Copies a value with JSON's types only. Anything else becomes a placeholder: objects have methods that a template
    must not call."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return getattr(kind, f"__{kind.__name__}__")(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value)) if type(value) in (list, tuple) else list(map(_plain, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if callable(getattr(value, "model_dump", None)):  # pydantic: messages of OpenAI's client
        return _plain(value.model_dump())
    if callable(getattr(value, "item", None)) and getattr(value, "ndim", None) == 0:  # a numpy number
        return _plain(value.item())
    return f"<{type(value).__name__}>"


# ---- The environment


def _check_version(version: str) -> None:
    found = tuple(int(part) for part in version.split(".")[:3] if part.isdecimal())
    if found < MIN_JINJA:
        wanted = ".".join(map(str, MIN_JINJA))
        raise ImportError(
            f"chat templates need jinja2>={wanted}, whose sandbox holds; this is {version}: pip install -U jinja2"
        )


class _Generation(ext.Extension):
    """`{% generation %}`, which marks the assistant's output for training. Here its body is rendered as ordinary
    text."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Dict:
    """`dict` without the attributes of the class."""

    def __call__(self, *args: Any, **items: Any) -> dict:
        return dict(*args, **items)

    def fromkeys(self, *args: Any) -> dict:
        return dict.fromkeys(*args)


class _Namespace(utils.Namespace):
    """`namespace` that refuses names of Python's internals."""

    def __init__(*args: Any, **items: Any) -> None:
        self, *rest = args
        attributes = dict(*rest, **items)
        for name in attributes:
            _check_name(name)
        utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"chat templates cannot use names that begin with an underscore; got {name!r}")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON. Jinja's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=64)
def _compile(template: str) -> Any:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment.from_string(template)
