"""The command `pace`: what it prints where, its exit codes, and that it is quick to say what it can do."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import pace
from pace import env
from pace.assets import TINY, TINY_DRAFT
from pace.cli import COMMANDS, main
from pace.cli.arguments import add_sampling_arguments, field_explanations, sampling_config
from pace.cli.environment import memory
from pace.cli.options_in_messages import rewrite
from pace.llm.configs import SamplingConfig
from tests.cli.processes import ENVIRONMENT, process
from tests.support import finish

CAPITAL = ["generate", "--chat", "What is the capital of Japan?"]


# -- the command itself ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["generate", "--help"], ["serve", "--help"]], ids=" ".join
)
def test_help_does_not_import_torch(arguments):
    program = f"import sys\nfrom pace.cli import main\ntry:\n    main({arguments})\nexcept SystemExit as stop:\n    sys.exit(stop.code or 'torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout


def test_help_names_every_command(command):
    for arguments in (["--help"], []):
        code, out, err = command(*arguments)
        assert (code, err) == (0, "") and all(re.search(rf"^  {name} ", out, re.MULTILINE) for name in COMMANDS)
    for name in COMMANDS:
        code, out, _ = command(name, "--help")
        assert code == 0 and out.startswith(f"usage: pace {name}")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nonsense"], "invalid choice"),
        (["env", "--nonsense"], "--nonsense"),
        (["generate", "x", "--top-k", "-1"], "--top-k"),
        (["generate", "x", "--top-k", "many"], "--top-k"),
        (["generate", "x", "--temp", "1"], "--temp"),
        (["generate", "x", "--logit-bias", "[1]"], "token id"),
        (["generate", "x", "--bad-words-ids", "[["], "JSON"),
        (["generate", "x", "--system", "y"], "--chat"),
        (["generate", "x", "--logprobs", "2"], "--json"),
        (["chat", "--logprobs", "2"], "--logprobs"),
        (["generate", "x", "--prompt-logprobs", "2"], "--prompt-logprobs needs --json"),
        (["chat", "--prompt-logprobs", "2"], "--prompt-logprobs"),
        (["generate", "--x"], "--x"),
        (["chat", "model.gguf"], "unrecognized arguments: model.gguf; a model is given by --model"),
        (["generate", "x", "--prompt-lookup", "--draft", "y"], "--draft"),
        (["chat", "--do-sample", "--num-return-sequences", "2"], "one answer"),
        (["chat", "--num-beams", "2"], "as it comes"),
        (["serve", "--port", "70000"], "--port must be from 0 to 65535"),
        (["serve", "--host", "0.0.0.0"], "--api-key-file"),
        (["serve", "--api-key", "k"], "--api-key"),
        (["serve", "--api-key-file", "/no/such/file"], "--api-key-file: cannot read /no/such/file"),
        (["serve", "--tls-cert", "/no/such/file"], "--tls-cert and --tls-key go together"),
        (["serve", "--cors-origin", "*"], "--cors-origin=* without a key"),
        (["serve", "--allowed-host", "a:80"], "--allowed-host: 'a:80'"),
        (["serve", "--max-body", "4G"], "--max-body"),
        (["serve", "--max-n", "0"], "--max-n must be at least 1"),
        (["serve", "--max-wait", "nan"], "--max-wait must be at least 0"),
        (["serve", "--max-seq-len", "x"], "--max-seq-len"),
        (["serve", "--port", "0", "--dtype", "int3"], "--dtype must be bfloat16"),
        (["serve", "--port", "0", "--quantization", "int3"], "there is no format 'int3'"),
        (["serve", "--quantization", "{int3"], "--quantization"),
        (["serve", "--draft", "x", "--prompt-lookup"], "--prompt-lookup"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_command_line_is_one_line_and_2(command, arguments, message):
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("pace: error: ") and message in err and err.count("\n") == 1 and "--help" in err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["generate", "x", "--model", "/no/such/directory"], "/no/such/directory"),
        (["generate", "x", "--dtype", "int3"], "int3"),
        (["generate", "x", "--num-beams", "2", "--num-return-sequences", "3"], "--num-beams=2"),
        (["generate", "x", "--pard", str(TINY_DRAFT)], "pard_token"),
        (["generate", "x", "--draft", "/no/such/directory"], "/no/such/directory"),
        (["generate", "x " * 3000], "tokens"),
        (["generate", "x", "--eos-token-id", "99999"], "99999"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_a_failure_is_one_line_and_1(command, arguments, message):
    code, out, err = command(*arguments)
    assert (code, out) == (1, "")
    assert err.startswith("pace: error: ") and message in err and err.count("\n") == 1 and "Traceback" not in err


TEXT = str(Path(__file__).parents[1] / "data" / "tiny_heldout.jsonl")
QUANTIZE = ["quantize", str(TINY), "out"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([*QUANTIZE, "--calibrate", TEXT, "--tokens", "10"], "--tokens must be at least 256; got 10"),
        ([*QUANTIZE], "give one (--calibrate), or --method='rtn'"),
        (
            [*QUANTIZE, "--method", "rtn", "--context", "64"],
            "--context would have no effect: there is no text to read; give one to calibrate on (--calibrate)",
        ),
        (
            [*QUANTIZE, "--method", "rtn", "--tokens", "512", "--tokenizer", "x"],
            "--tokens and --tokenizer would have no effect",
        ),
        ([*QUANTIZE, "--method", "rtn", "--calibrate", TEXT, "--tokens", "512"], "--tokens=512 would have no effect"),
        ([*QUANTIZE, "--method", "rtn", "--calibrate", TEXT, "--no-report"], "the report is turned off (--no-report)"),
        ([*QUANTIZE, "--method", "rtn", "--no-act-order"], "--no-act-order tells GPTQ"),
        ([*QUANTIZE, "--method", "awq", "--calibrate", TEXT, "--act-order"], "--act-order tells GPTQ"),
        ([*QUANTIZE, "--calibrate", TEXT, "--context", "5000"], "--context must be from 2 to the 1024"),
        ([*QUANTIZE, "--method", "rtn", "--keep", "*.nothing"], "--keep: no module matches '*.nothing'"),
        ([*QUANTIZE, "--method", "rtn", "--num-threads", "0"], "--num-threads must be in 1.."),
        ([*QUANTIZE, "--format", "nf4"], "load the original with --quantization='nf4'"),
        (["eval", "--text", TEXT, "--context", "5000"], "--context must be from 2 to the 1024"),
        (["eval", "--text", TEXT, "--max-seq-len", "1"], "--max-seq-len must be from 2 to the 1024"),
        (["eval", "--text", TEXT, "--dtype", "int3"], "--dtype must be bfloat16"),
        (["eval", "--text", TEXT, "--kv-cache-bytes", "2G"], "--kv-cache-bytes: a size is"),
        (["eval", "--text", TEXT, "--kv-cache-bytes", "10"], "--kv-cache-bytes=10 is too little"),
        (["eval", "--text", TEXT, "--bmc-rows", "8"], "--bmc-rows=8 is for --kv-cache-type='bmc'"),
        (
            ["eval", "--text", TEXT, "--prefix-cache-bytes", "9999999", "--kv-cache-bytes", "1MiB"],
            "--prefix-cache-bytes=9999999 is a part of --kv-cache-bytes",
        ),
        (["eval", str(TINY), "--text", TEXT, "--revision", "x"], "--revision='x' was given"),
        (["eval", "nobody/nothing", "--text", TEXT, "--local-files-only"], "--local-files-only forbids"),
        (["plan", str(TINY), "--kv-cache-dtype", "int3"], "--kv-cache-dtype must be 'auto'"),
        (["plan", str(TINY), "--num-threads", "0"], "--num-threads must be in 1.."),
        (["plan", str(TINY), "--revision", "x"], "--revision='x' was given"),
        (["bench", str(TINY), "--kv-cache-dtype", "int3"], "--kv-cache-dtype must be 'auto'"),
        (["bench", str(TINY), "--num-threads", "0"], "--num-threads must be in 1.."),
        (["bench", str(TINY), "--dtype", "int3"], "--dtype must be bfloat16"),
        (
            ["generate", "x", "--num-beams", "2", "--num-return-sequences", "3"],
            "--num-return-sequences=3 exceeds --num-beams=2",
        ),
        (["generate", "x", "--num-return-sequences", "3"], "set --do-sample, or --num-beams"),
        (["generate", "x", "--top-k", "-1"], "--top-k must be an int in"),
        (["generate", "x", "--eos-token-id", "-1"], "--eos-token-id must be an int >= 0, got -1; set --ignore-eos to"),
    ],
    ids=lambda value: (
        " ".join(value).replace(TEXT, "TEXT").replace(str(TINY), "MODEL") if isinstance(value, list) else ""
    ),
)
def test_errors_name_options_as_they_are_typed(command, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, out, err = command(*arguments)
    assert out == "" and message in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_errors_in_python_name_arguments_whatever_a_command_does_meanwhile(monkeypatch):
    """As a server in the same process would tell its clients."""
    told = []

    def run(arguments):
        for wrong in ({"max_new_tokens": -1}, {"do_sample": 3}):
            with pytest.raises((TypeError, ValueError)) as caught:
                SamplingConfig(**wrong)
            told.append(str(caught.value).split()[0])
        return 0

    monkeypatch.setattr("pace.cli.generate.run", run)
    assert main(["generate", "x"]) == 0 and told == ["max_new_tokens", "do_sample"]


OPTIONS = {"max_new_tokens": "--max-new-tokens", "context": "--context", "group": "--group", "overrides": "--keep"}
OPTIONS |= {"max_tokens": "--tokens", "calibrate": "--calibrate", "dtype": "--dtype"}
FLAGS = {("act_order", True): "--act-order", ("act_order", False): "--no-act-order", ("report", False): "--no-report"}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("max_new_tokens=5 is too many; lower max_new_tokens, or", "--max-new-tokens=5 is too many; lower --max-new-tokens, or"),
        ("context must be 2; the context is read", "--context must be 2; the context is read"),
        ("context and max_tokens would have no effect", "--context and --tokens would have no effect"),
        ("give one to calibrate on (calibrate), or calibrate it", "give one to calibrate on (--calibrate), or calibrate it"),
        ("load with dtype=bfloat16; tensor x is of dtype float64", "load with --dtype=bfloat16; tensor x is of dtype float64"),
        ("overrides: no module; leave it out by overrides", "--keep: no module; leave it out by --keep"),
        ("act_order=False tells (report=False), report=True", "--no-act-order tells (--no-report), report=True"),
        ("act_order=Falsely", "act_order=Falsely"),
        ("/x/generation_config.json: max_tokens must be 3", "/x/generation_config.json: max_tokens must be 3"),
        ("QuantizationConfig('int4', group=32) with group=3", "QuantizationConfig('int4', group=32) with --group=3"),
        ("no 'max_tokens' in /a/max_tokens/b, max_tokens-x, a.max_tokens, my_max_tokens, max_tokens.txt", None),
        ("group 3 of the context has no dtype", None),
    ],
)  # fmt: skip
def test_arguments_in_messages_become_options(message, expected):
    find = lambda name, flag: OPTIONS.get(name) if flag is None else FLAGS.get((name, flag))
    assert rewrite(message, find) == (expected or message)


def test_debug_shows_where():
    for arguments in (
        ["--debug", "generate", "x", "--model", "/no/such/directory"],
        ["generate", "x", "--model", "/no/such/directory", "--debug"],
    ):
        running = process(*arguments)
        out, err = finish(running)
        assert running.returncode == 1 and out == "" and "Traceback" in err and "/no/such/directory" in err


def test_a_reader_that_goes_away_is_no_error():
    running = process("generate", "Once upon a time", "--max-new-tokens", "900", "--ignore-eos")
    running.stdout.read(10)
    running.stdout.close()
    assert finish(running) == ("", "") and running.returncode == 141


# -- generate ----------------------------------------------------------------------------------------------------------


def test_generate(command):
    assert command(*CAPITAL) == (0, "The capital of Japan is Tokyo.\n", "")
    code, out, err = command("generate", "1, 2, 3, 4,", "--max-new-tokens", "8", "--metrics")
    assert code == 0 and out.startswith(" 5, 6, 7") and "tokens/s" in err and err.count("\n") == 1


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
    ran = {line.split()[0]: line.split()[1] for line in err.splitlines()[1:]}
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
    code, out, err = command("generate", "--", "--x")
    assert (code, err) == (0, "") and out


def test_a_setting_without_effect_is_told(command):
    code, out, err = command("generate", "Once upon", "--max-new-tokens", "3", "--temperature", "0.5")
    assert code == 0 and out and "temperature set, but without effect" in err
    assert command("generate", "Once upon", "--max-new-tokens", "3", "--temperature", "0.5", "--no-do-sample") == (
        0,
        out,
        "",
    )


def test_generate_reads_stdin(command):
    expected = command("generate", "Question: What is 8 + 9?\nAnswer:")
    assert expected[0] == 0 and "17" in expected[1]
    assert command("generate", "-", stdin="Question: What is 8 + 9?\nAnswer:\n") == expected
    assert command("generate", stdin="Question: What is 8 + 9?\nAnswer:") == expected
    code, out, err = command("generate", "-", stdin=b"\xff\xfe")
    assert (code, out) == (2, "") and "UTF-8" in err


def test_generate_from_a_terminal_wants_a_prompt():
    """At a terminal it does not wait for an input that nobody knows of."""
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
        "generate",
        "Once upon a time",
        "--do-sample",
        "--seed",
        "5",
        "--num-return-sequences",
        "3",
        "--max-new-tokens",
        "12",
    ]
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


def test_ctrl_c_in_json_tells_what_there_is():
    running = process(
        "generate", "Once upon a time", "--max-new-tokens", "1000", "--ignore-eos", "--json", "--debug", bufsize=1
    )
    for line in running.stderr:  # the log tells that the model is there
        if "pace:" in line:
            break
    running.send_signal(signal.SIGINT)
    out, _ = finish(running)
    assert running.returncode == 130
    assert out == "" or json.loads(out)["finish_reasons"] in ([], ["cancelled"])


# -- the options of SamplingConfig -------------------------------------------------------------------------------------

VALUES = {
    "max_new_tokens": ("7", 7), "max_length": ("70", 70), "min_new_tokens": ("2", 2), "temperature": ("0.5", 0.5), "top_k": ("3", 3),
    "top_p": ("0.9", 0.9), "min_p": ("0.1", 0.1), "typical_p": ("0.9", 0.9), "repetition_penalty": ("1.2", 1.2),
    "frequency_penalty": ("-1.5", -1.5), "presence_penalty": ("1", 1.0), "no_repeat_ngram_size": ("3", 3), "num_beams": ("4", 4),
    "length_penalty": ("-0.5", -0.5), "early_stopping": ("never", "never"), "num_return_sequences": ("2", 2), "eos_token_id": ("5 --eos-token-id 6", [5, 6]),
    "pad_token_id": ("3", 3), "bad_words_ids": ("[[5,6],[7]]", [[5, 6], [7]]), "logit_bias": ('{"42":1.5,"7":"-inf"}', {42: 1.5, 7: float("-inf")}),
    "seed": ("11", 11), "logprobs": ("4", 4), "prompt_logprobs": ("3", 3),
}  # fmt: skip


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
    }  # from Python alone


def test_a_text_of_a_form(command, tmp_path):
    schema, grammar = tmp_path / "city.json", tmp_path / "list.gbnf"
    schema.write_text('{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}')
    grammar.write_text('root ::= "- " [a-z]+ "."')
    code, out, err = command("generate", "A city:", "--json-schema", str(schema), "--max-new-tokens", "30")
    assert code == 0 and out.startswith('{"n":')
    code, out, err = command("generate", "A list:", "--grammar", str(grammar), "--max-new-tokens", "30")
    assert code == 0 and re.match("- [a-z]", out)
    code, out, err = command("generate", "Yes or no?", "--choices", "yes", "no")
    assert code == 0 and out.strip() in ("yes", "no")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--json-schema", "nowhere.json"), "'nowhere.json' cannot be read"),
        (("--json-schema", __file__), "not valid JSON"),
        (("--regex", "a", "--choices", "b"), "give one of --regex=, --choices="),
        (("--regex", "(?<=a)b"), "look-around"),
    ],
)
def test_what_is_no_form_is_told(command, arguments, message):
    code, out, err = command("generate", "x", *arguments)
    assert code != 0 and message in err and not out


def test_explanations_come_from_the_fields():
    explanations = field_explanations(SamplingConfig)
    assert "0 is off" in explanations["no_repeat_ngram_size"] and "\n" not in "".join(explanations.values())


# -- env ---------------------------------------------------------------------------------------------------------------


def test_env(command, monkeypatch):
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    code, out, err = command("env", "--json")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert report["pace"] == pace.__version__ and report["versions"]["torch"]
    assert report["instruction_set"]["chosen"] in report["instruction_set"]["available"]
    assert (
        1
        <= report["threads"]["default"]
        <= report["threads"]["physical_cores"]
        <= report["threads"]["logical_cpus"]
        == len(os.sched_getaffinity(0))
    )
    assert 0 < report["memory"]["available_bytes"] <= report["memory"]["total_bytes"]
    assert set(report["variables"]) == {variable.name for variable in env.VARIABLES}
    code, out, _ = command("env")
    assert code == 0 and report["instruction_set"]["chosen"] in out and report["threads"]["reason"] in out
    assert all(re.search(rf"^{variable.name} +not set \(.*default: ", out, re.MULTILINE) for variable in env.VARIABLES)


@pytest.mark.parametrize("isa, code", [("generic", 0), ("nonsense", 1)])
def test_env_tells_what_was_forced(isa, code):
    running = process("env", env={**ENVIRONMENT, "PACE_ISA": isa})
    out, err = finish(running)
    assert (running.returncode, err) == (code, "")
    assert re.search(
        rf"instruction set +{'generic: PACE_ISA asks for it' if code == 0 else 'none: PACE_ISA=nonsense'}", out
    )


@pytest.mark.parametrize(
    "threads, code, shown",
    [
        ("3", 0, "3: PACE_NUM_THREADS asks for it"),
        ("many", 1, "none: PACE_NUM_THREADS must be"),
        ("99999", 1, "none: PACE_NUM_THREADS must be"),
    ],
)
def test_env_tells_the_threads_that_were_asked_for(command, monkeypatch, threads, code, shown):
    monkeypatch.setenv("PACE_NUM_THREADS", threads)
    found, out, _ = command("env")
    assert found == code and re.search(rf"^threads +{shown}", out, re.MULTILINE)


def test_env_variables_are_read_through_the_table():
    with pytest.raises(KeyError, match="PACE_NONSENSE"):
        env.value("PACE_NONSENSE")


def test_no_other_file_reads_the_environment():
    sources = [path for path in Path(pace.__file__).parent.rglob("*.py") if path.name != "env.py"]
    assert len(sources) > 20
    assert not [path for path in sources if re.search(r"os\.environ|getenv", path.read_text())]


@pytest.mark.parametrize(
    "files, expected",
    [
        ({}, (None, None)),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/memory.max": "1000\n", "sys/fs/cgroup/a/b/memory.max": "max\n"}, (1000, "/sys/fs/cgroup/a/memory.max")),
        ({"proc/self/cgroup": "0::/gone\n", "sys/fs/cgroup/memory.max": "500\n"}, (500, "/sys/fs/cgroup/memory.max")),
        (
            {"proc/self/cgroup": "5:cpu:/x\n4:memory:/x\n", "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "700\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"},
            (700, "/sys/fs/cgroup/memory/x/memory.limit_in_bytes"),
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "99999999\n"}, (None, None)),
        ({"proc/self/limits": "Limit  Soft Limit Hard Limit Units\nMax address space         2000   unlimited   bytes\n"}, (2000, "ulimit -v")),
    ],
    ids=["nothing", "an ancestor's", "in a container", "version 1", "more than there is", "address space"],
)  # fmt: skip
def test_memory_limits(tmp_path, files, expected):
    for name, text in {"proc/meminfo": "MemTotal: 4096 kB\nMemAvailable: 1024 kB\n", **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = memory(tmp_path)
    available = min(1024 * 1024, expected[0] or 1024 * 1024)  # what loading goes by
    assert (found["total_bytes"], found["available_bytes"]) == (4096 * 1024, available)
    assert (found["limit_bytes"], found["limit_source"]) == expected
