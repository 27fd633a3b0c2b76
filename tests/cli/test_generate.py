"""`pace generate`: texts, samples and their JSON, and an option for each field of `SamplingConfig`."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import sys
from dataclasses import fields
from types import SimpleNamespace

import pytest

from pace.assets import TINY, TINY_DRAFT
from pace.cli.arguments import field_explanations
from pace.cli.sampling import add_sampling_arguments, sampling_config
from pace.llm import LLMModel
from pace.llm.configs import ALIASES, WITHOUT_EFFECT, SamplingConfig
from tests.cli.processes import process
from tests.support import finish

CAPITAL = ["generate", "--chat", "What is the capital of Japan?"]


def test_generate(command):
    assert command(*CAPITAL) == (0, "The capital of Japan is Tokyo.\n", "")
    code, out, err = command("generate", "1, 2, 3, 4,", "--max-new-tokens", "8", "--metrics")
    assert code == 0 and out.startswith(" 5, 6, 7") and "tokens/s" in err and err.count("\n") == 2


CUT = "pace: the text is cut off after"


@pytest.mark.parametrize(
    ("arguments", "notice"),
    [
        (["--max-new-tokens", "3"], f"{CUT} 3 tokens: --max-new-tokens N allows more\n"),
        (["--max-tokens", "3", "--chat"], f"{CUT} 3 tokens: --max-new-tokens N allows more\n"),
        (["--max-length", "9"], "tokens: --max-new-tokens N allows more\n"),
        (["--max-seq-len", "20", "--ignore-eos"], "tokens: the context of 20 tokens is full\n"),
        (["--n", "2", "--do-sample", "--max-tokens", "3"], "pace: 2 of 2 texts are cut off after 3 tokens"),
        (["--num-beams", "2", "--max-tokens", "3"], f"{CUT} 3 tokens"),
        (["--max-tokens", "40", "--json"], ""),  # finish_reasons has the reason
        (["--chat"], ""),
    ],
)
def test_a_cut_is_told_of(command, arguments, notice):
    code, out, err = command("generate", "What is 7 + 8?", *arguments)
    assert code == 0 and out and (notice in err if notice else not err)


@pytest.mark.parametrize("arguments", [[], ["--chat"], ["--num-beams", "2"]])
def test_a_text_goes_on_to_the_end_of_the_context(command, arguments):
    code, out, err = command(
        "generate", "Once upon a time", "--max-seq-len", "290", "--ignore-eos", "--json", *arguments
    )
    metrics = json.loads(out)["metrics"]
    assert code == 0 and metrics["num_prompt_tokens"] + metrics["num_generated_tokens"] == 290


@pytest.mark.parametrize("length", [{"max_new_tokens": 7}, {"max_length": 11}])
def test_a_length_of_the_checkpoint_counts(command, tmp_path, length):
    shutil.copytree(TINY, tmp_path / "model")
    (tmp_path / "model/generation_config.json").write_text(json.dumps(length))
    code, out, err = command("generate", str(tmp_path / "model"), "1, 2, 3, 4,", "--ignore-eos")
    assert code == 0 and "cut off after" in err and len(out) < 40


@pytest.mark.parametrize("drafts", [["--prompt-lookup"], ["--draft", str(TINY_DRAFT)]], ids=" ".join)
def test_drafts_change_the_metrics_alone(command, drafts):
    question = ["generate", "--chat", "Copy this sentence: She sells sea shells by the sea shore.", "--json"]
    plain, drafted = (json.loads(command(*question, *more)[1]) for more in ([], drafts))
    assert plain.pop("metrics")["num_drafted_tokens"] == 0 and drafted.pop("metrics")["num_drafted_tokens"] > 0
    assert plain == drafted
    assert command("chat", *drafts, stdin="What is the capital of Spain?\n") == (
        0,
        "The capital of Spain is Madrid.\n",
        "",
    )


def test_operators_are_chosen_and_what_ran_is_printed(command):
    code, out, err = command(
        "generate", "1, 2, 3, 4,", "--max-new-tokens", "4", "--backend", "norm=torch, mlp=torch", "--operators"
    )
    assert code == 0 and out == " 5, 6,\n"
    ran = {line.split()[0]: line.split()[1] for line in err.splitlines()[2:]}
    assert ran == {
        "embedding": "native",
        "norm": "torch",
        "projection": "native",
        "rotary": "native",
        "attention": "native",
        "mlp": "torch",
        "lm_head": "native",
    }


@pytest.mark.parametrize(
    "wrong, words",
    [("cuda", "attention=torch,mlp=torch"), ("nom=torch", "did you mean 'norm'"), ("mlp=gpu", "got 'gpu'")],
)
def test_a_backend_that_is_not_there_is_a_usage_error(command, wrong, words):
    for name in ("generate", "chat", "bench"):
        code, out, err = command(name, "--backend", wrong)
        assert (code, out) == (2, "") and words in err


def test_a_prompt_may_look_like_an_option(command):
    code, out, err = command("generate", "--json", "--max-new-tokens", "3", "--", "--x")
    assert (code, err, json.loads(out)["prompt"]) == (0, "", "--x")
    code, out, err = command("generate", "--max-new-tokens", "3", "--", "--x")
    assert code == 0 and out and CUT in err


def test_a_setting_without_effect_is_told(command):
    code, out, err = command("generate", "Once upon", "--max-new-tokens", "3", "--length-penalty", "0.5")
    assert code == 0 and out and "length_penalty set, but without effect" not in err
    assert "--length-penalty set, but without effect" in err


def test_a_temperature_is_enough_to_sample(command):
    story = ["generate", "Once upon a time", "--max-tokens", "12", "--json"]
    texts = {
        json.loads(command(*story, "--temperature", "1.5", "--seed", str(seed))[1])["texts"][0] for seed in range(3)
    }
    assert len(texts) == 3
    greedy = json.loads(command(*story)[1])["texts"]
    for flags in (["--temperature", "0"], ["--temperature", "1.5", "--no-do-sample"]):
        assert json.loads(command(*story, *flags)[1])["texts"] == greedy


def test_a_chat_is_sampled_by_default_and_a_text_is_not(command, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    fields = json.loads((TINY / "generation_config.json").read_text())
    del fields["do_sample"]
    (model / "generation_config.json").write_text(json.dumps(fields))
    story = ["generate", str(model), "Tell me a story about a dog.", "--max-tokens", "24", "--json"]
    for flags, num_texts in ((["--chat"], 3), (["--chat", "--temperature", "0"], 1), ([], 1)):
        ends = [command(*story, *flags, "--seed", str(seed)) for seed in range(3)]
        assert len({json.loads(out)["texts"][0] for _, out, _ in ends}) == num_texts, flags
        assert all(("--seed set, but without effect" in err) == (num_texts == 1) for *_, err in ends), flags


def test_generate_reads_stdin(command):
    expected = command("generate", "Question: What is 8 + 9?\nAnswer:")
    assert expected[0] == 0 and "17" in expected[1]
    assert command("generate", "-", stdin="Question: What is 8 + 9?\nAnswer:\n") == expected
    assert command("generate", stdin="Question: What is 8 + 9?\nAnswer:") == expected
    code, out, err = command("generate", "-", stdin=b"\xff\xfe")
    assert (code, out) == (2, "") and "UTF-8" in err


def test_a_checkpoint_alone_is_no_prompt(command, tmp_path):
    """The bundled model would continue the path as a text."""
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for word in (f"{TINY}/", tmp_path / "model.gguf"):
        code, out, err = command("generate", str(word), stdin="1, 2, 3,")
        assert (code, out) == (2, "") and f"{str(word)!r} is a model, but a single argument is the prompt" in err
    given = ["--max-tokens", "3"]
    assert command("generate", "1, 2, 3,", *given)[0] == 0
    assert command("generate", str(TINY), "-", *given, stdin="1, 2, 3,")[0] == 0
    assert command("generate", "-m", str(TINY), str(TINY), *given)[0] == 0
    assert command("generate", "x" * 5000, *given)[0] != 0  # an error about the context's length, not about a path


@pytest.mark.parametrize("word", ["Qwen/Qwen2.5-0.5B-Instruct", "org/name-GGUF:Q4_K_M", "no/such/Model.gguf"])
def test_a_model_alone_next_to_a_piped_prompt_is_no_prompt(command, word, monkeypatch):
    """The bundled model would continue the name as a text, and ignore stdin."""
    read, write = os.pipe()
    os.write(write, b"1, 2, 3,")
    os.close(write)
    with open(read) as pipe:
        monkeypatch.setattr("pace.cli.arguments.sys", SimpleNamespace(stdin=pipe))
        code, out, err = command("generate", word)
    assert (code, out) == (2, "") and f"`{word} -` to read the prompt from stdin" in err
    assert command("generate", "and/or", "--max-tokens", "3", stdin="")[0] == 0


def test_generate_from_a_terminal_wants_a_prompt():
    """At a terminal it exits with an error instead of silently waiting for input."""
    controller, terminal = pty.openpty()
    running = process("generate", stdin=terminal)
    out, err = finish(running)
    os.close(controller), os.close(terminal)
    assert running.returncode == 2 and "no prompt" in err


def test_generate_json(command):
    code, out, err = command(*CAPITAL, "--json", "--logprobs", "2", "--prompt-logprobs", "1")
    result = json.loads(out)
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert (
        result["prompt"] == CAPITAL[-1]
        and result["texts"] == ["The capital of Japan is Tokyo."]
        and result["finish_reasons"] == ["stop"]
    )
    assert (
        len(result["generated_token_ids"][0]) == len(result["logprobs"][0]) == result["metrics"]["num_generated_tokens"]
    )
    assert all(len(token["top"]) == 2 and token["logprob"] <= 0 for token in result["logprobs"][0])
    assert result["prompt_logprobs"][0][0] is None and all(
        len(token["top"]) == 1 for token in result["prompt_logprobs"][0][1:]
    )


def test_generate_several_samples(command):
    sampling = [
        "generate", "Once upon a time", "--do-sample", "--seed", "5", "--num-return-sequences", "3", "--max-new-tokens",
        "12",
    ]  # fmt: skip
    code, out, _ = command(*sampling)
    assert code == 0 and re.findall(r"^\[(\d)\]$", out, re.MULTILINE) == ["0", "1", "2"]
    texts = json.loads(command(*sampling, "--json")[1])["texts"]
    assert len(set(texts)) > 1 and all(text in out for text in texts)


def test_generate_with_beams(command):
    beams = ["generate", "Once upon a time", "--num-beams", "3", "--num-return-sequences", "2", "--max-new-tokens", "8"]
    code, out, _ = command(*beams)
    assert code == 0 and re.findall(r"^\[(\d)\]$", out, re.MULTILINE) == ["0", "1"]
    result = json.loads(command(*beams, "--json")[1])
    assert result["sequence_scores"] == sorted(result["sequence_scores"], reverse=True) and all(
        text in out for text in result["texts"]
    )
    assert command(*beams[:4], "--max-new-tokens", "8")[1] == result["texts"][0] + "\n"


def test_generate_with_a_system_prompt(command):
    assert json.loads(command(*CAPITAL, "--json", "--system", "You are a pirate.")[1])["metrics"][
        "num_prompt_tokens"
    ] > (json.loads(command(*CAPITAL, "--json")[1])["metrics"]["num_prompt_tokens"] + 3)


# -- the options of SamplingConfig -------------------------------------------------------------------------------------

VALUES = {
    "max_new_tokens": ("7", 7), "max_length": ("70", 70), "min_new_tokens": ("2", 2), "temperature": ("0.5", 0.5),
    "top_k": ("3", 3),
    "top_p": ("0.9", 0.9), "min_p": ("0.1", 0.1), "typical_p": ("0.9", 0.9), "repetition_penalty": ("1.2", 1.2),
    "frequency_penalty": ("-1.5", -1.5), "presence_penalty": ("1", 1.0), "no_repeat_ngram_size": ("3", 3),
    "num_beams": ("4", 4),
    "length_penalty": ("-0.5", -0.5), "early_stopping": ("never", "never"), "num_return_sequences": ("2", 2),
    "eos_token_id": ("5 --eos-token-id 6", [5, 6]),
    "suppress_tokens": ("5 --suppress-tokens 6", [5, 6]),
    "pad_token_id": ("3", 3), "bad_words_ids": ("[[5,6],[7]]", [[5, 6], [7]]), "logit_bias": ('{"42":1.5,"7":"-inf"}',
    {42: 1.5, 7: float("-inf")}),
    "thinking_budget": ("9", 9), "seed": ("11", 11), "logprobs": ("4", 4),
    "prompt_logprobs": ("3", 3), "json_whitespace": ("spaced", "spaced"),
}  # fmt: skip
VALUES |= {name: (str(value), value) for name, value in WITHOUT_EFFECT.items() if name not in VALUES}


def parse(*arguments: str) -> SamplingConfig:
    import argparse

    parser = argparse.ArgumentParser()
    add_sampling_arguments(parser)
    return sampling_config(parser.parse_args(arguments))


@pytest.mark.parametrize("name", VALUES)
def test_every_field_has_an_option(name):
    text, value = VALUES[name]
    config = parse("--" + name.replace("_", "-"), *text.split(" "))
    assert getattr(config, name) == value and config.explicit_fields == {name}


def test_names_of_other_tools_are_options_too():
    said = ["--max-tokens", "3", "--n", "2", "--stop", "a", "--stop", "b", "--min-tokens", "1"]
    ours = SamplingConfig(max_new_tokens=3, num_return_sequences=2, stop_strings=["a", "b"], min_new_tokens=1)
    assert parse(*said) == ours
    assert parse("--max-completion-tokens", "3").max_new_tokens == 3
    for name in ALIASES:
        assert name == "logits_processor" or f"--{name.replace('_', '-')}" in _options()


def _options() -> dict:
    import argparse

    parser = argparse.ArgumentParser()
    add_sampling_arguments(parser)
    return parser._option_string_actions


def test_the_other_fields():
    assert parse("--do-sample", "--no-ignore-eos").explicit_fields == {"do_sample", "ignore_eos"}
    assert parse("--token-healing", "--unmasked-logprobs").explicit_fields == {"token_healing", "unmasked_logprobs"}
    assert parse("--do-sample").do_sample is True and parse("--no-do-sample").do_sample is False
    assert parse("--stop-strings", "a b", "--stop-strings", "c").stop_strings == ["a b", "c"]
    assert parse().explicit_fields == set()
    assert parse("--choices", "a b", "c").choices == ["a b", "c"] and parse("--regex", "a+").regex == "a+"
    covered = set(VALUES) | {"do_sample", "ignore_eos", "token_healing", "unmasked_logprobs", "stop_strings"}
    covered |= {"choices", "regex", "json_schema", "grammar"}
    assert {field.name for field in fields(SamplingConfig)} - covered == {
        "logits_processors",
        "step_callback",
        "step_every",
        "step_strings",
        "token_mask",
        "response_format",
    }  # only from Python


def test_a_text_of_a_form(command, tmp_path):
    schema, grammar = tmp_path / "city.json", tmp_path / "list.gbnf"
    schema.write_text('{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}')
    grammar.write_text('root ::= "- " [a-z]+ "."')
    for text in (str(schema), schema.read_text()):
        code, out, err = command("generate", "A city:", "--json-schema", text, "--max-new-tokens", "30")
        assert code == 0 and out.startswith('{"n":')
    code, out, err = command("generate", "A list:", "--grammar", str(grammar), "--max-new-tokens", "30")
    assert code == 0 and re.match("- [a-z]", out)
    code, out, err = command("generate", "Yes or no?", "--choices", "yes", "no")
    assert code == 0 and out.strip() in ("yes", "no")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--json-schema", "nowhere.json"), "'nowhere.json' cannot be read"),
        (("--json-schema", '{"type": '), "the JSON schema is not valid JSON"),
        (("--json-schema", __file__), "not valid JSON"),
        (("--regex", "a", "--choices", "b"), "give one of --regex=, --choices="),
        (("--regex", "(?<=a)b"), "this regex cannot be used: look-around"),
        (("--regex", "a("), "this regex cannot be used: unclosed group"),
        (("--grammar", "start: foo"), 'this grammar cannot be used: at 1(8): unknown name: "foo"'),
        (("--grammar", "root ::= foo"), "this is not a GBNF grammar: Rule 'foo' not found"),
        (("--grammar", "root ::= ("), "this is not a GBNF grammar"),
        (("--json-schema", '{"pattern": "(?=a)"}'), "#/pattern: look-around"),
    ],
)
@pytest.mark.parametrize("name", ["generate", "chat"])
def test_what_is_no_form_is_told_before_the_model_is_loaded(command, name, arguments, message, tmp_path):
    option, *values = arguments
    if option == "--grammar":
        (tmp_path / "form").write_text(values[0])
        values = [str(tmp_path / "form")]
    code, out, err = command(name, "-m", "no/such/model", *(["x"] if name == "generate" else []), option, *values)
    assert (code, out, err.count("\n")) == (2, "", 1) and message in err


@pytest.mark.parametrize("option", [["--regex", "a"], ["--grammar", "{gbnf}"], ["--choices", "a"]], ids=" ".join)
def test_a_grammar_without_its_package_says_what_to_install(command, option, tmp_path, monkeypatch):
    (tmp_path / "a.gbnf").write_text('root ::= "a"')
    monkeypatch.setitem(sys.modules, "llguidance", None)
    words = [word.format(gbnf=tmp_path / "a.gbnf") for word in option]
    code, out, err = command("generate", "-m", "no/such/model", "x", *words)
    assert code != 0 and not out and 'pip install "pace-llm[grammar]"' in err


def test_explanations_come_from_the_fields():
    explanations = field_explanations(SamplingConfig)
    assert "0 is off" in explanations["no_repeat_ngram_size"] and "\n" not in "".join(explanations.values())


def test_a_suffix_reaches_the_model_or_is_refused_by_it(command, monkeypatch):
    code, out, err = command("generate", "def f(", "--suffix", "return x")
    assert (code, out) == (1, "") and "was not trained to fill a gap" in err
    given, generate = [], LLMModel.generate
    monkeypatch.setattr(
        LLMModel, "generate", lambda *words, suffix, **more: given.append(suffix) or generate(*words, **more)
    )
    assert command("generate", "1, 2, 3,", "--suffix", "8, 9", "--max-new-tokens", "2")[0] == 0 and given == ["8, 9"]
