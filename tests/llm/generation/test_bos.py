"""Prompts that begin with the text of the BOS token, with a tokenizer that also adds that token."""

from __future__ import annotations

import logging

import pytest
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from tests.llm.generation.scripted import scripted
from tests.llm.text.tokenizer_zoo import ZOO


def with_bos(kind: str, adds_bos: bool = True, template: str | None = None) -> PreTrainedTokenizerFast:
    backend = Tokenizer.from_str(ZOO[kind]().backend_tokenizer.to_str())
    bos = "<s>" if kind == "sentencepiece" else "<pad>"
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    end = ZOO[kind]().eos_token
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=end, chat_template=template)


@pytest.mark.parametrize("kind", ZOO)
def test_two_are_told_of_once_and_stay(kind: str, caplog) -> None:
    generator = scripted(with_bos(kind))
    bos = generator.tokenizer.bos_token
    calls = [
        lambda text: generator.generate(text, max_new_tokens=1),
        lambda text: list(generator.stream(text, max_new_tokens=1)),
        lambda text: generator.generate(["a", text], max_new_tokens=1),
    ]
    with caplog.at_level(logging.WARNING, "pace"):
        calls[0]("fox")
        assert not caplog.records
        for call in calls:
            call(f"{bos}fox")
        assert len(caplog.records) == 1 and bos in caplog.text and "begins with 2" in caplog.text
    out = generator.generate(f"{bos}fox", max_new_tokens=1)
    assert out.output_token_ids[0, :2].tolist() == 2 * [generator.tokenizer.bos_token_id]


@pytest.mark.parametrize("kind", ZOO)
def test_where_the_tokenizer_adds_none_or_nobody_gives_text_nothing_is_told(kind: str, caplog) -> None:
    with caplog.at_level(logging.WARNING, "pace"):
        plain, adding = scripted(with_bos(kind, adds_bos=False)), scripted(with_bos(kind))
        bos = plain.tokenizer.bos_token
        plain.generate(f"{bos}fox", max_new_tokens=1)
        plain.generate(f"{bos}{bos}fox", max_new_tokens=1)
        adding.generate(2 * [adding.tokenizer.bos_token_id] + [9], max_new_tokens=1)
        adding.generate(f"fox{bos}", max_new_tokens=1)
    assert not caplog.records


def test_the_server_tells_of_it_too(caplog) -> None:
    pytest.importorskip("starlette")
    from tests.server.serving import Serving

    for ask in (
        lambda serving: serving.complete("<s>fox", max_tokens=1),
        lambda serving: serving.chat(add_special_tokens=True, max_tokens=1),
    ):
        caplog.clear()
        tokenizer = with_bos("sentencepiece", template="<s>{{ messages[0]['content'] }}")
        with caplog.at_level(logging.WARNING, "pace"), Serving(scripted(tokenizer)) as serving:
            serving.chat(max_tokens=1)  # only the template adds a BOS token
            assert "begins with" not in caplog.text
            for _ in range(4):
                assert ask(serving).status == 200
        assert caplog.text.count("begins with 2 <s> tokens") == 1
