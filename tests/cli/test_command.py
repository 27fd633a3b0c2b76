"""The command `pace`: its output on stdout and stderr, its exit codes, and the speed of its help."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from pace.assets import TINY, TINY_DRAFT
from pace.cli import COMMANDS, main
from pace.cli.options_in_messages import rewrite
from pace.llm.configs import SamplingConfig
from tests.cli.processes import ENVIRONMENT

HEAVY = (
    "torch",
    "numpy",
    "transformers",
    "tokenizers",
    "huggingface_hub",
    "safetensors",
    "starlette",
    "pydantic",
    "jinja2",
)
QUICK = """
import sys
from pace.cli import main

for arguments in {commands}:
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = stop.code or 0
    loaded = sorted(set({heavy}) & set(sys.modules))
    assert code == 0 and not loaded, f"{{arguments}}: exit code {{code}}, imports {{loaded}}"
"""


def test_what_is_said_at_once_imports_nothing_heavy():
    """The help of all commands, the version, and `pace env`."""
    commands = [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS), ["env"], ["env", "--json"]]
    program = QUICK.format(commands=commands, heavy=HEAVY)
    result = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "") and "instruction set" in result.stdout


def test_help_names_every_command(command):
    for arguments in (["--help"], []):
        code, out, err = command(*arguments)
        assert (code, err) == (0, "") and all(re.search(rf"^  {name} ", out, re.MULTILINE) for name in COMMANDS)
    for name in COMMANDS:
        code, out, _ = command(name, "--help")
        assert code == 0 and out.startswith(f"usage: pace {name}")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_about_options_and_not_about_python(command, name):
    _, text, _ = command(name, "--help")
    names = "|".join(field.name for field in fields(SamplingConfig) if "_" in field.name)
    words = rf"\b(None|True|False|dict|pydantic|SamplingConfig|QuantizationConfig|pace\.llm\.\w+|(?<!/){names})\b"
    assert not re.findall(words, re.sub(r'"[^"]*"', "", text))


@pytest.mark.parametrize(
    "arguments, message",
    [(["nonsense"], "invalid choice"), (["genrate", "x"], "; did you mean generate?"), (["env", "--nonsense"],
     "--nonsense"),
     (["generate", "x", "--top-k", "-1"], "--top-k"), (["generate", "x", "--top-k", "many"], "--top-k"),
     (["generate", "x", "--temp", "1"], "--temp"), (["generate", "x", "--logit-bias", "[1]"], "token id"),
     (["generate", "x", "--bad-words-ids", "[["], "JSON"), (["generate", "x", "--system", "y"], "--chat"),
     (["generate", "x", "--suffix", "y", "--chat"], "--suffix does not work with --chat"),
     (["generate", "x", "--logprobs", "2"], "--json"), (["chat", "--logprobs", "2"], "--logprobs"),
     (["generate", "x", "--prompt-logprobs", "2"], "--prompt-logprobs needs --json"),
     (["chat", "--prompt-logprobs", "2"], "--prompt-logprobs"), (["generate", "--x"], "--x"),
     (["chat", "model.gguf", "x"], "unrecognized arguments: x; for one question and its answer: pace generate --chat"),
     (["generate", "a", "b", "c"], "unrecognized arguments: c"),
     (["generate", "--model", "a", "b", "c"], "the model is given twice, as 'b' and by --model"),
     (["chat", "a", "-m", "b"], "given twice"), (["eval", "a", "-m", "b", "--text", "t"], "given twice"),
     (["generate", "x", "--temp", "1"], "; did you mean --temperature?"),
     (["generate", "x", "--n-predict", "5"], "--n-predict 5; --max-new-tokens bounds the generated tokens"),
     (["generate", "x", "--repeat-penalty", "1.1"], "--repeat-penalty 1.1; --repetition-penalty is the same"),
     (["generate", "x", "--num-ctx", "9"], "--num-ctx 9; --max-seq-len bounds prompt and output"),
     (["cache", "drop"], "invalid choice: 'drop'"),
     (["cache", "lst"], "; did you mean list?"), (["cache", "list", "x"], "takes no names"),
     (["plan"], "no model to plan for"), (["bench"], "no model to measure"), (["quantize", "out"], "give two paths"),
     (["generate", "x", "--prompt-lookup", "--draft", "y"], "--draft"),
     (["chat", "--do-sample", "--num-return-sequences", "2"], "a single answer"),
     (["chat", "--num-beams", "2"], "while they come"),
     (["serve", "--port", "70000"], "--port must be from 0 to 65535"),
     (["serve", "--host", "0.0.0.0"], "--api-key-file"), (["serve", "--api-key", "k"], "--api-key"),
     (["serve", "--api-key-file", "/no/such/file"], "--api-key-file: cannot read /no/such/file"),
     (["serve", "--tls-cert", "/no/such/file"], "give both --tls-cert and --tls-key"),
     (["serve", "--cors-origin", "*"], "--cors-origin=* without a key"),
     (["serve", "--allowed-host", "a:80"], "--allowed-host: 'a:80'"), (["serve", "--max-body", "4G"], "--max-body"),
     (["serve", "--max-n", "0"], "--max-n must be at least 1"),
     (["serve", "--max-wait", "nan"], "--max-wait must be at least 0"),
     (["serve", "--max-seq-len", "x"], "--max-seq-len"),
     (["serve", "--port", "0", "--dtype", "int3"], "--dtype must be bfloat16"),
     (["serve", "--port", "0", "--quantization", "int3"], "there is no format 'int3'"),
     (["serve", "--quantization", "{int3"], "--quantization"),
     (["serve", "--draft", "x", "--prompt-lookup"], "--prompt-lookup")],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_a_wrong_command_line_is_one_line_and_2(command, arguments, message):
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("pace: error: ") and message in err and err.count("\n") == 1 and "--help" in err


@pytest.mark.parametrize(
    "arguments, message",
    [(["generate", "x", "--model", "/no/such/directory"], "/no/such/directory"),
     (["generate", "x", "--dtype", "int3"], "int3"),
     (["generate", "x", "--num-beams", "2", "--num-return-sequences", "3"], "--num-beams=2"),
     (["generate", "x", "--pard", str(TINY_DRAFT)], "pard_token"),
     (["generate", "x", "--draft", "/no/such/directory"], "/no/such/directory"), (["generate", "x " * 3000], "tokens"),
     (["generate", "x", "--eos-token-id", "99999"], "99999")],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)  # fmt: skip
def test_a_failure_is_one_line_and_1(command, arguments, message):
    code, out, err = command(*arguments)
    assert (code, out) == (1, "")
    assert err.startswith("pace: error: ") and message in err and err.count("\n") == 1 and "Traceback" not in err


WORDS = {
    "generate": (["hi"], "prompt"), "quantize": (["there"], "out"), "batch": (["a", "b"], "output"),
    "transcribe": (["a.wav"], "file"),
}  # fmt: skip
"""Positional arguments of a command after its model, and the field that gets the last of them."""
MORE = {"eval": ["--text", "t"]}


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("env", "cache")])
def test_every_command_takes_its_model_as_a_word_and_as_an_option(name, monkeypatch):
    given = []
    monkeypatch.setattr(f"{COMMANDS[name][0]}.run", lambda arguments: given.append(vars(arguments)) or 0)
    words, last = WORDS.get(name, ([], "model"))
    flag, more = ["--num-threads", "1"], MORE.get(name, [])
    for argv in (
        ["here", *words], ["here", *flag, *words], [*flag, "here", *words], ["-m", "here", *words],
        [*words, "--model", "here"], [*words[:1], "-m", "here", *words[1:]], ["--model=here", "--", *words],
    ):  # fmt: skip
        assert main([name, *more, *argv]) == 0, argv
        models = given[-1].get("named_models") or [given[-1]["model"]]
        assert models == ["here"] and (not words or given[-1][last] == words[-1]), argv
    if name not in ("plan", "bench", "quantize"):
        assert main([name, *more, *words]) == 0 and given[-1]["model"] == str(TINY)
    if words:
        assert main([name, "here", "--", *words[:-1], "-x"]) == 0 and given[-1][last] == "-x"


TEXT = str(Path(__file__).parents[1] / "data" / "tiny_heldout.jsonl")
QUANTIZE = ["quantize", str(TINY), "out"]


@pytest.mark.parametrize(
    "arguments, message",
    [([*QUANTIZE, "--calibrate", TEXT, "--tokens", "10"], "--tokens must be at least 256; got 10"),
     ([*QUANTIZE], "give one (--calibrate), or --method='rtn'"),
     ([*QUANTIZE, "--method", "rtn", "--context", "64"],
       "--context would have no effect without a text; give one (--calibrate)"),
     ([*QUANTIZE, "--method", "rtn", "--tokens", "512", "--tokenizer", "x"],
       "--tokens and --tokenizer would have no effect"),
     ([*QUANTIZE, "--method", "rtn", "--calibrate", TEXT, "--tokens", "512"], "--tokens=512 would have no effect"),
     ([*QUANTIZE, "--method", "rtn", "--calibrate", TEXT, "--no-report"], (
         "the text would have no effect on the method "
         "rtn with --no-report"
     )),
     ([*QUANTIZE, "--method", "rtn", "--no-act-order"], "--no-act-order has no effect"),
     ([*QUANTIZE, "--method", "awq", "--calibrate", TEXT, "--act-order"], "--act-order has no effect"),
     ([*QUANTIZE, "--calibrate", TEXT, "--context", "5000"], "--context must be from 2 to the 1024"),
     ([*QUANTIZE, "--method", "rtn", "--keep", "*.nothing"], "--keep: no module matches '*.nothing'"),
     ([*QUANTIZE, "--method", "rtn", "--num-threads", "0"], "--num-threads must be from 1 to"),
     ([*QUANTIZE, "--format", "nf4"], "load the original with --quantization='nf4'"),
     (["eval", "--text", TEXT, "--context", "5000"], "--context must be from 2 to the 1024"),
     (["eval", "--text", TEXT, "--max-seq-len", "1"], "--max-seq-len must be from 2 to 1024"),
     (["eval", "--text", TEXT, "--dtype", "int3"], "--dtype must be bfloat16"),
     (["eval", "--text", TEXT, "--kv-cache-bytes", "2G"], "--kv-cache-bytes: a size is"),
     (["eval", "--text", TEXT, "--kv-cache-bytes", "10"], "--kv-cache-bytes=10 is too small"),
     (["eval", "--text", TEXT, "--bmc-rows", "8"], "--bmc-rows=8 needs --kv-cache-type='bmc'"),
     (["eval", "--text", TEXT, "--prefix-cache-bytes", "9999999", "--kv-cache-bytes", "1MiB"],
       "--prefix-cache-bytes=9999999 is more than all"),
     (["eval", str(TINY), "--text", TEXT, "--revision", "x"], "--revision='x' was given"),
     (["eval", "nobody/nothing", "--text", TEXT, "--local-files-only"], "--local-files-only forbids"),
     (["plan", str(TINY), "--kv-cache-dtype", "int3"], "--kv-cache-dtype must be 'auto'"),
     (["plan", str(TINY), "--num-threads", "0"], "--num-threads must be from 1 to"),
     (["plan", str(TINY), "--revision", "x"], "--revision='x' was given"),
     (["bench", str(TINY), "--kv-cache-dtype", "int3"], "--kv-cache-dtype must be 'auto'"),
     (["bench", str(TINY), "--num-threads", "0"], "--num-threads must be from 1 to"),
     (["bench", str(TINY), "--dtype", "int3"], "--dtype must be bfloat16"),
     (["generate", "x", "--num-beams", "2", "--num-return-sequences", "3"],
       "--num-return-sequences=3 exceeds --num-beams=2"),
     (["generate", "x", "--num-return-sequences", "3"], "set --do-sample, or --num-beams"),
     (["generate", "x", "--top-k", "-1"], "--top-k must be an int in"),
     (["generate", "x", "--eos-token-id", "-1"],
       "--eos-token-id must be an int >= 0, got -1; set --ignore-eos to")],
    ids=lambda value: (
        " ".join(value).replace(TEXT, "TEXT").replace(str(TINY), "MODEL") if isinstance(value, list) else ""
    ),
)  # fmt: skip
def test_errors_name_options_as_they_are_typed(command, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, out, err = command(*arguments)
    assert out == "" and message in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_errors_in_python_name_arguments_whatever_a_command_does_meanwhile(monkeypatch):
    """A server in the same process, for example, reports these errors to its clients."""
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
        ("max_new_tokens=5 is too many; lower max_new_tokens, or", (
            "--max-new-tokens=5 is too many; lower "
            "--max-new-tokens, or"
        )),
        ("context must be 2; the context is read", "--context must be 2; the context is read"),
        ("context and max_tokens would have no effect", "--context and --tokens would have no effect"),
        ("give one to calibrate on (calibrate), or calibrate it", (
            "give one to calibrate on (--calibrate), or "
            "calibrate it"
        )),
        ("load with dtype=bfloat16; tensor x is of dtype float64", (
            "load with --dtype=bfloat16; tensor x is of dtype "
            "float64"
        )),
        ("context, max_tokens set, but without effect", "--context, --tokens set, but without effect"),
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
