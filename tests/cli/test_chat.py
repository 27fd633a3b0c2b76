"""`pace chat` from a pipe, its commands, and the part of the conversation that it keeps."""

from __future__ import annotations

import json
import shutil

import pytest

from pace.assets import TINY
from pace.cli.chat import Conversation
from pace.cli.chat.history import MOST_ENTRIES, History
from pace.llm import ChatOutput, SamplingConfig
from pace.llm.chat import Text
from tests.llm.bundled import bundled

SPAIN, MADRID = "What is the capital of Spain?\n", "The capital of Spain is Madrid.\n"
PORTUGAL, LISBON = "And of Portugal?\n", "The capital of Portugal is Lisbon.\n"


def test_chat_remembers(command):
    assert command("chat", stdin=SPAIN + PORTUGAL) == (0, MADRID + LISBON, "")


def test_chat_commands(command):
    lines = (
        f"{SPAIN}\n/help\n/nonsense\n/reset\n/system You are a helpful assistant.\nWhat is 7 + 8?\n/exit\nnever read\n"
    )
    code, out, err = command("chat", stdin=lines)
    assert (code, out) == (0, MADRID + "7 + 8 = 15\n")
    assert "/system TEXT" in err and "no command /nonsense" in err and err.count("a new conversation") == 2


@pytest.mark.parametrize("word", ["/exit", "/quit", "/bye"])
def test_words_of_other_tools(command, word):
    code, out, err = command("chat", stdin=f"/?\n/clear\n{word}\n{SPAIN}")
    assert (code, out) == (0, "") and "/system TEXT" in err and "a new conversation" in err


@pytest.mark.parametrize("lines", ['"""What is\n  7 + 8?"""', '"""\nWhat is\n  7 + 8?\n"""  '])
def test_a_text_of_several_lines(command, tmp_path, lines):
    code, out, err = command("chat", stdin=f"{lines}\n/save {tmp_path}/talk.json\n")
    assert code == 0 and out.count("\n") == 1
    assert json.loads((tmp_path / "talk.json").read_text())[0]["content"] == "What is\n  7 + 8?"


@pytest.mark.parametrize("line", ["/usr/bin/env is what?", "// a comment", "/", " /help"])
def test_a_path_is_no_command(command, tmp_path, line):
    code, out, err = command("chat", "--max-new-tokens", "3", stdin=f"{line}\n/save {tmp_path}/talk.json\n")
    assert code == 0 and out and json.loads((tmp_path / "talk.json").read_text())[0]["content"] == line.strip()


def test_what_stands_between_quotes_is_no_command(command):
    assert command("chat", stdin='"""What is the capital of Spain?"""\n') == (0, MADRID, "")
    code, out, err = command("chat", stdin='"""/help"""\n')
    assert code == 0 and out and not err
    code, out, err = command("chat", stdin='"""What is\n')
    assert (code, out) == (0, "") and err.startswith("pace: error: ") and 'without the closing """' in err


def test_set(command):
    lines = (
        "/set max_new_tokens 3\nWhat is the capital of Spain?\n/set --max-new-tokens\nWhat is the capital of Spain?\n"
    )
    code, out, err = command("chat", stdin=lines)
    first, second = out.splitlines()
    assert code == 0 and MADRID.startswith(first) and len(first) < len(second) and second + "\n" == MADRID
    told = err.splitlines()
    assert told[0] == "(set: max_new_tokens 3; defaults: do_sample false)" and len(told) == 3
    assert told[2] == "(set: nothing; defaults: do_sample false)"
    assert "cut off after 3 tokens" in told[1]


@pytest.mark.parametrize(
    ("line", "message"),
    [("temperatur 1", "did you mean 'temperature'"), ("temperature warm", "temperature: invalid float value: 'warm'"),
     ("top_k -1", "top_k must be"), ("do_sample maybe", "do_sample must be true or false"),
     ("num_beams 2", "while they come"), ("num_return_sequences 2", "a single answer"),
     ("logprobs 2", "does not show them"), ("logits_processors 2", "can only be set from Python"),
     ("penalty_alpha 2", "pace does not implement it")],
)  # fmt: skip
def test_settings_that_are_refused(command, line, message):
    code, out, err = command("chat", stdin=f"/set {line}\n/set\n")
    refusal, now = err.splitlines()
    assert (code, out) == (0, "") and refusal.startswith("pace: error: ") and message in refusal
    assert now.startswith("(set: nothing; ")


@pytest.mark.parametrize("name", ["max_tokens", "--max-tokens", "max-completion-tokens", "max_new_tokens"])
def test_set_knows_names_of_other_tools(command, name):
    code, out, err = command("chat", stdin=f"/set {name} 3\n{SPAIN}/set {name}\n{SPAIN}/set {name} many\n")
    assert (code, out) == (0, "The capital of\n" + MADRID)
    first, cut, second, refused = err.splitlines()
    assert "max_new_tokens 3" in first and "cut off after 3" in cut and "(set: nothing;" in second
    assert "invalid int value: 'many'" in refused and name.strip("-").replace("_", "-") in refused
    code, out, err = command("chat", stdin="/set stop a b\n/set n 2\n/set stop\n")
    told = err.splitlines()
    assert "stop_strings ['a b']" in told[0] and "a single answer" in told[1] and "(set: nothing;" in told[2]


def test_set_shows_what_decides_about_draws(command, tmp_path):
    """`/set` shows the defaults of a chat, the checkpoint's settings, and the values that were set."""
    home = tmp_path / "model"
    shutil.copytree(TINY, home)
    for said, defaults in (
        ({}, "do_sample true, temperature 0.7, top_k 0, top_p 0.9, min_p 0.0, typical_p 1.0"),
        (
            {"do_sample": True, "top_k": 64},
            "do_sample true, temperature 1.0, top_k 64, top_p 1.0, min_p 0.0, typical_p 1.0",
        ),
        ({"do_sample": False, "top_k": 64}, "do_sample false"),
    ):
        (home / "generation_config.json").write_text(json.dumps(said))
        code, out, err = command("chat", str(home), stdin="/set\n")
        assert (code, out, err) == (0, "", f"(set: nothing; defaults: {defaults})\n")
    _, _, err = command("chat", stdin="/set temperature 0.5\n/set temperature 0\n/set do_sample false\n")
    warm, cold, off = err.splitlines()
    assert warm.endswith("defaults: do_sample true, top_k 0, top_p 1.0, min_p 0.0, typical_p 1.0)")
    assert cold == "(set: temperature 0.0; defaults: do_sample false)"
    assert off == "(set: do_sample false, temperature 0.0; defaults: nothing)"


def test_settings_of_every_kind(command):
    settings = {
        "do_sample": "true", "stop_strings": "a b", "choices": '"a b" c', "regex": r"\d+",
        "logit_bias": '{"4": -1}',
    }  # fmt: skip
    settings |= {"early_stopping": "never", "eos_token_id": "3"}
    code, out, err = command("chat", stdin="".join(f"/set {name} {text}\n" for name, text in settings.items()))
    expected = [
        "do_sample true", "stop_strings ['a b']", "choices ['a b', 'c']", r"regex \d+", "logit_bias {4: -1.0}",
        "early_stopping never", "eos_token_id [3]",
    ]  # fmt: skip
    assert (code, out) == (0, "") and all(text in err.splitlines()[-1] for text in expected)


def test_a_warning_comes_once(command):
    code, out, err = command("chat", "--length-penalty", "0.5", stdin=SPAIN + PORTUGAL)
    assert (code, out) == (0, MADRID + LISBON) and err.count("without effect") == 1


def test_stats(command):
    code, out, err = command("chat", "--max-seq-len", "256", stdin="/stats\n" + SPAIN + "/stats\n")
    assert (code, out) == (0, MADRID)
    refusal, times, context = err.splitlines()
    assert (
        "no answer yet" in refusal and "tokens/s" in times and "of 256 tokens (" in context and "2 messages" in context
    )


def test_regen(command):
    """Another answer replaces the last one, and later turns see only the new answer."""
    code, out, err = command("chat", stdin=f"/regen\n{SPAIN}/regen\n{PORTUGAL}")
    assert (code, out) == (0, 2 * MADRID + LISBON)
    refusal, same = err.splitlines()
    assert "no answer yet" in refusal and "the same again" in same
    story = "Tell me a story about a dog.\n"
    code, out, err = command("chat", "--do-sample", "--max-new-tokens", "12", stdin=f"{story}/regen\n/regen\n")
    assert len(set(out.splitlines())) > 1 and "the same" not in err


def test_save(command, tmp_path):
    file = tmp_path / "talk.json"
    code, out, err = command(
        "chat", "--system", "Be brief.", stdin=f"{SPAIN}/save {file}\n{PORTUGAL}/save {file}\n/save\n"
    )
    assert code == 0 and "5 messages" in err and "/save FILE" in err
    messages = json.loads(file.read_text())
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert messages[3]["content"] + "\n" == PORTUGAL and messages[4]["content"] + "\n" == LISBON
    assert "exists already" in command("chat", stdin=f"{SPAIN}/save {file}\n")[2]
    assert json.loads(file.read_text()) == messages
    assert "No such file" in command("chat", stdin=f"{SPAIN}/save {tmp_path}/no/where\n")[2]


def test_load(command, tmp_path):
    """The next question continues the saved conversation, which may be saved there again. `/regen` works on it."""
    file = tmp_path / "talk.json"
    command("chat", "--system", "Be brief.", stdin=f"{SPAIN}/save {file}\n")
    code, out, err = command("chat", stdin=f"/load {file}\n/regen\n{PORTUGAL}/save {file}\n/reset\n")
    assert (code, out) == (0, MADRID + LISBON)
    loaded, same, saved, reset = err.splitlines()
    assert f"3 messages from {file}" in loaded and "5 messages" in saved and "Be brief." in reset
    file.write_text("[]")
    assert command("chat", stdin=f"{SPAIN}/load {file}\n/regen\n")[2].count("no answer yet") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [("[", "Expecting value"), ('{"role": "user"}', "messages must be a list"), ("null", "messages must be a list"),
     ('["What?"]', "messages[0] must be a dict"), ('[{"role": "king", "content": "What?"}]', "unknown role king"),
     ('[{"role": "user", "content": 5}]', "messages[0].content must be text"),
     ('[{"role": "assistant", "tool_calls": [{}]}]', "messages[0].tool_calls[0].function.name must be")],
)  # fmt: skip
def test_what_is_no_conversation(command, tmp_path, text, message):
    """It is refused, and the current conversation continues."""
    file = tmp_path / "talk.json"
    file.write_text(text)
    code, out, err = command("chat", stdin=f"{SPAIN}/load {file}\n{PORTUGAL}")
    assert (code, out) == (0, MADRID + LISBON) and err.count("\n") == 1
    assert err.startswith(f"pace: error: {file} holds no conversation for this model: ") and message in err


def test_load_needs_a_file(command, tmp_path):
    code, out, err = command("chat", stdin=f"/load\n/load {tmp_path}/nowhere\n/load {tmp_path}\n")
    nameless, missing, directory = err.splitlines()
    assert (code, out) == (0, "") and "/load FILE" in nameless
    assert "No such file" in missing and "Is a directory" in directory


def test_tools(command, tmp_path):
    """A call is shown, and the next line of input is its result."""
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    file = tmp_path / "tools.json"
    file.write_text(json.dumps([{"type": "function", "function": {"name": "get_weather", "parameters": city}}]))
    lines = f"What is the weather in Rome?\nsunny, 25 degrees\n{SPAIN}"
    code, out, err = command("chat", "--tools", str(file), stdin=lines)
    assert (code, err) == (0, "")
    assert out == f'get_weather({{"city": "Rome"}})\nIt is 25 degrees.\n{MADRID}'
    question, result = lines.splitlines()[:2]
    command("chat", "--tools", str(file), stdin=f"{question}\n/save {tmp_path}/talk.json\n")
    code, out, err = command("chat", "--tools", str(file), stdin=f"/load {tmp_path}/talk.json\n{result}\n")
    assert out == "It is 25 degrees.\n" and "2 messages" in err and "the result of get_weather comes next" in err
    for text in ("[5]", "{", '[{"name": "a b"}]'):
        file.write_text(text)
        code, out, err = command("chat", "--tools", str(file), stdin="")
        assert code != 0 and "holds no tools" in err and not out


# -- a full context ----------------------------------------------------------------------------------------------------


def test_a_text_that_is_longer_than_the_context(command):
    """It is refused and discarded, and the conversation continues."""
    code, out, err = command("chat", stdin=SPAIN + "x " * 3000 + f"\n{PORTUGAL}")
    assert (code, out) == (0, MADRID + LISBON) and err.startswith("pace: error: ") and err.count("\n") == 1
    assert "the context holds 1024" in err and "forgotten" not in err


def test_the_oldest_turns_are_forgotten(command):
    capitals = {"France": "Paris", "Japan": "Tokyo", "Italy": "Rome", "Egypt": "Cairo", "Spain": "Madrid"}
    questions = "".join(f"What is the capital of {country}?\n" for country in capitals)
    code, out, err = command("chat", "--max-seq-len", "256", stdin=3 * questions)
    assert code == 0 and out.splitlines() == 3 * [f"The capital of {a} is {b}." for a, b in capitals.items()]
    warned, forgotten = "% of the context of 256 tokens", "the context of 256 tokens is full"
    assert 0 <= err.find(warned) < err.find(forgotten) and "pace: error" not in err
    assert err.count(warned) <= err.count(forgotten) + 1


def test_what_is_kept_of_a_full_context():
    """The system prompt and the newest whole turns are kept, up to half of the context."""
    model, notices = bundled(), []
    conversation = Conversation(model, SamplingConfig(max_new_tokens=8), "Be brief.", None, notices.append)
    for number in range(40):
        conversation.messages += [
            {"role": "user", "content": f"{number} " + "word " * 20},
            {"role": "assistant", "content": "yes"},
        ]
    before = list(conversation.messages)
    list(conversation.answer("What is 7 + 8?"))
    system, *kept = conversation.messages
    assert system == before[0] and kept[0]["role"] == "user" and kept[:-2] == before[-len(kept) + 2 :]
    half = model.max_seq_len // 2
    assert half * 0.8 < conversation.num_tokens - 8 <= half
    [notice] = notices
    assert f"the {(len(before) - 1) // 2 - (len(kept) - 2) // 2} oldest turns are forgotten" in notice


@pytest.mark.parametrize("words", [["chat"], ["generate", "--chat", "hi"]], ids=" ".join)
def test_a_missing_template_is_told_before_weights_are_read(command, words, tmp_path, monkeypatch):
    home = tmp_path / "model"
    shutil.copytree(TINY, home)
    config = json.loads((home / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (home / "tokenizer_config.json").write_text(json.dumps(config))
    (home / "chat_template.jinja").unlink(missing_ok=True)
    monkeypatch.setattr("pace.llm.loading.load.fill_model", lambda *arguments: pytest.fail("weights were read"))
    code, out, err = command(*words, "-m", str(home))
    assert (code, out, err.count("\n")) == (1, "", 1) and "no chat template" in err


def test_an_empty_answer_is_told(command):
    code, out, err = command("chat", "--stop", "The", stdin=SPAIN)
    assert (code, out.strip(), err) == (0, "", "(the answer is empty; /regen asks again)\n")


def test_an_answer_that_is_cut_off_is_told(command):
    code, out, err = command("chat", "--max-new-tokens", "1", stdin=SPAIN)
    assert code == 0 and "cut off after 1 token: /set" in err
    code, out, err = command("chat", "--max-new-tokens", "5", stdin=SPAIN)
    assert code == 0 and "cut off after 5 tokens: /set max_new_tokens" in err
    code, out, err = command("chat", "--max-seq-len", "40", "--ignore-eos", stdin=SPAIN)
    assert code == 0 and "the context is full" in err and "100 % of the context" in err


# -- what the model is given -------------------------------------------------------------------------------------------


class Answer:
    """An answer whose pieces are a, b and c."""

    def __init__(self):
        self.said = []
        self.is_closed = False

    def __iter__(self):
        for letter in "abc":
            self.said.append(letter)
            yield Text(letter)

    def close(self):
        self.is_closed = True

    @property
    def output(self):
        assert self.is_closed or len(self.said) == 3
        if not self.said:
            raise ValueError("this answer was closed before it began")
        metrics = bundled().generate("a", SamplingConfig(max_new_tokens=1)).metrics
        return ChatOutput("".join(self.said), "", [], "cancelled" if self.is_closed else "stop", None, metrics)


class Recorder:
    """A model that only records its calls."""

    tokenizer, generator, max_seq_len = bundled().tokenizer, bundled().generator, 1024

    def __init__(self):
        self.given = []

    def chat(self, messages, config, tools, stream, adapter=None):
        self.given.append([(message["role"], message["content"]) for message in messages])
        return Answer()


def test_the_messages_turn_by_turn():
    """The messages that the model gets, and what an interrupted answer leaves in them."""
    model = Recorder()
    conversation = Conversation(model, SamplingConfig(), "be brief")
    assert list(conversation.answer("one")) == ["a", "b", "c"]
    answer = conversation.answer("two")
    next(answer)
    with pytest.raises(KeyboardInterrupt):
        answer.throw(KeyboardInterrupt)
    list(conversation.answer("three"))
    system, one, two = (
        ("system", "be brief"),
        [("user", "one"), ("assistant", "abc")],
        [("user", "two"), ("assistant", "a")],
    )
    assert model.given == [[system, one[0]], [system, *one, two[0]], [system, *one, *two, ("user", "three")]]
    conversation.restart(None)
    list(conversation.answer("four"))
    assert model.given[-1] == [("user", "four")]


def test_an_answer_that_is_stopped_before_it_begins_leaves_nothing(monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt
        yield

    conversation = Conversation(Recorder(), SamplingConfig(), None)
    monkeypatch.setattr(Answer, "__iter__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(conversation.answer("one"))
    assert conversation.messages == []


# -- history -----------------------------------------------------------------------------------------------------------


def test_history_is_kept_in_a_file_of_its_own(tmp_path):
    path = tmp_path / "state" / "chat_history"
    texts = ["one", "two\nlines", "three", "three"]
    history = History(path)
    assert history.read() == []
    for text in texts:
        history.add(text)
    assert History(path).read() == texts[:3] and path.stat().st_mode & 0o777 == 0o600
    path.write_text('"a"\n{\n5\n"b\\u0000"\n"c"\n')
    assert History(path).read() == ["a", "c"]


def test_history_does_not_grow_without_end(tmp_path):
    path = tmp_path / "chat_history"
    path.write_text("".join(f'"{number}"\n' for number in range(2 * MOST_ENTRIES + 1)))
    entries = History(path).read()
    assert len(entries) == MOST_ENTRIES and entries[-1] == str(2 * MOST_ENTRIES) and History(path).read() == entries
    assert len(path.read_text().splitlines()) == MOST_ENTRIES and [*tmp_path.iterdir()] == [path]


def test_history_that_cannot_be_written_is_told_of_once(tmp_path, caplog):
    (tmp_path / "file").touch()
    history = History(tmp_path / "file" / "chat_history")
    history.read()
    for text in ("one", "two"):
        history.add(text)
    assert len(caplog.records) == 1 and "not saved for the next run" in caplog.text


def test_a_conversation_goes_on_in_the_next_run(command, tmp_path):
    """The second run computes only what is new. A run that says nothing leaves the file as it is."""
    kept = tmp_path / "kept"
    code, out, err = command("chat", "--session", str(kept), stdin=SPAIN)
    assert (code, out) == (0, MADRID) and err == f"(2 messages in {kept})\n"
    before = kept.read_bytes()
    assert command("chat", "--session", str(kept), stdin="") == (0, "", f"(2 messages from {kept})\n")
    assert kept.read_bytes() == before
    code, out, err = command("chat", "--session", str(kept), stdin=f"{PORTUGAL}/stats\n")
    assert (code, out) == (0, LISBON) and err.startswith(f"(2 messages from {kept})\n")
    assert f"(4 messages in {kept})" in err and "34 prompt (16 of them reused)" in err


@pytest.mark.parametrize("folder", ["none", "file"])
def test_a_session_that_cannot_be_written_is_refused_first(command, tmp_path, folder):
    (tmp_path / "file").write_text("")
    code, out, err = command("chat", "--session", str(tmp_path / folder / "kept"), stdin=SPAIN)
    assert code == 2 and not out and f"{tmp_path / folder} is not a folder" in err


def test_files_of_other_sessions_are_refused(command, tmp_path):
    kept = tmp_path / "kept"
    with bundled().session() as session:
        session.append([5])
        session.save(kept)
    before = kept.read_bytes()
    code, out, err = command("chat", "--session", str(kept), stdin=SPAIN)
    assert code == 1 and not out and "dtype of the weights was float32" in err
    code, out, err = command("chat", "--dtype", "float32", "--session", str(kept), stdin=SPAIN)
    assert code == 1 and not out and f"{kept} holds no conversation" in err
    code, out, err = command("chat", "--system", "Hi", "--session", str(kept), stdin=SPAIN)
    assert code == 2 and not out and "leave it out, or begin another file" in err
    assert kept.read_bytes() == before
