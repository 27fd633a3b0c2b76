"""The training text, made up from a seed: `documents(rng)` yields it, `write_heldout` writes a file of it.

A document is a list of (text, weight): the weight is how much its tokens count in the loss. What a user says is often
random and cannot be predicted, so it counts little.

    python training/data.py --seed 7 --bytes 150000 --out tests/data/tiny_heldout.jsonl
"""

import argparse
import json
import random
from pathlib import Path

from facts import CAPITALS, QUESTIONS
from stories import MARK, name, pseudo_word, story
from tasks import arithmetic, capital, copying, counting, exchange, extraction, sentence
from tools import no_tool_chat, tool_chat

BOS, EOS, END = "<|bos|>", "<|eos|>", "<|end|>"
USER_WEIGHT = 0.1
SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "You are Tiny, a helpful assistant.",
    "Answer the question.",
    "Be brief.",
    "You are a friendly assistant. Answer in short sentences.",
]


def render(messages):
    """The chat as the template in tokenizer_config.json writes it (a test compares the two)."""
    parts = [(BOS, 0.0)]
    for message in messages:
        weight = 1.0 if message["role"] == "assistant" else USER_WEIGHT
        parts += [(f"<|{message['role']}|>", 0.0), *weighted(message["content"] + END, weight)]
    return parts


def weighted(content, weight):
    """The parts of a text, the marked ones with four times the weight."""
    return [(part, weight * (4 if i % 2 else 1)) for i, part in enumerate(content.split(MARK)) if part]


def chat(rng):
    if rng.random() < 0.14:
        return tool_chat(rng)
    if rng.random() < 0.01:
        return no_tool_chat(rng)
    messages = []
    if rng.random() < 0.25:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    turns = rng.choices([1, 2, 3, 5], [70, 15, 10, 5])[0]
    pairs = [exchange(rng, short=turns > 2) for _ in range(turns)]
    if turns > 1 and rng.random() < 0.35:
        pairs = follow_up(rng, pairs)
    for user, answer in pairs:
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
    return messages


def follow_up(rng, pairs):
    """Turns that can be answered only from the turns before."""
    roll = rng.random()
    if roll < 0.45:
        who = name(rng, unseen=0.5)
        hello = (
            rng.choice([f"My name is {who}.", f"Hello, I am {who}.", f"Hi! My name is {who}."]),
            f"Nice to meet you, {who}!",
        )
        return [
            hello,
            *pairs[: rng.randint(0, 2)],
            (rng.choice(["What is my name?", "Do you remember my name?", "Who am I?"]), f"Your name is {who}."),
        ]
    if roll < 0.7:
        a, b, c = rng.sample(list(CAPITALS), 3)
        return [
            (f"What is the capital of {a}?", f"The capital of {a} is {CAPITALS[a]}."),
            *[
                (
                    rng.choice([f"And of {x}?", f"And the capital of {x}?", f"What about {x}?"]),
                    f"The capital of {x} is {CAPITALS[x]}.",
                )
                for x in (b, c)[: rng.randint(1, 2)]
            ],
        ]
    if roll < 0.85:
        word = pseudo_word(rng)
        return [
            (f"Remember the word {word}.", f"I will remember the word {word}."),
            *pairs[:1],
            (rng.choice(["What was the word?", "Which word did you remember?"]), f"The word was {word}."),
        ]
    user, answer = pairs[0]
    return [
        (user, answer),
        (rng.choice(["Say that again.", "Can you repeat that?", "Please repeat your answer."]), answer),
    ]


def plain(rng):
    """A document that is no chat, so that a bare prompt has a sensible continuation too."""
    roll = rng.random()
    if roll < 0.2:
        return "".join(story(rng)[1:])
    if roll < 0.5:
        user, answer = exchange(rng, short=True)
        return f"Question: {user}\nAnswer: {answer}"
    if roll < 0.76:
        user, answer = rng.choice([arithmetic, capital, counting, extraction, copying])(rng)
        return rng.choice([f"{user}\n{answer}", f"{user} {answer}"])
    if roll < 0.9:
        countries = rng.sample(list(CAPITALS), rng.randint(1, 5))
        form = rng.choice(["{c} is the capital of {l}.", "The capital of {l} is {c}."])
        return " ".join(form.format(l=country, c=CAPITALS[country]) for country in countries)
    if roll < 0.95:
        return " ".join(rng.sample(list(QUESTIONS.values()), rng.randint(2, 6)))
    a, n = rng.choice([0, 1, rng.randint(0, 90)]), rng.randint(4, 20)
    return rng.choice([", ", " ", "\n"]).join(str(a + i) for i in range(n))


def drill(rng):
    """A sentence two to four times: the plainest lesson in copying. Only the repetitions count."""
    line, between = sentence(rng), rng.choice(["\n", " ", " "])
    return [(BOS, 0.0), (line, USER_WEIGHT), ((between + line) * rng.randint(1, 3) + EOS, 1.0)]


def sums(rng):
    """A page of sums up to 20, where nearly only the results count; in a chat they are too rare to be learned soon."""
    parts = [(BOS, 0.0)]
    for _ in range(rng.randint(4, 12)):
        parts += [*weighted(arithmetic(rng)[1], 0.5), ("\n", USER_WEIGHT)]
    return parts[:-1] + [(EOS, USER_WEIGHT)]


def document(rng):
    roll = rng.random()
    if roll < 0.08:
        return drill(rng)
    if roll < 0.16:
        return sums(rng)
    if roll < 0.86:
        return render(chat(rng))
    return [(BOS, 0.0), *weighted(plain(rng) + EOS, 0.6)]


def documents(seed):
    """An endless stream of documents, the same for the same seed."""
    rng = random.Random(seed)
    while True:
        yield document(rng)


def text(doc):
    return "".join(part for part, _ in doc)


def write_heldout(path, seed, size):
    """Documents, special tokens in place, one JSON object {"text": ...} a line; about `size` bytes. Training never sees
    these seeds."""
    lines, written = [], 0
    for doc in documents(f"heldout-{seed}"):
        lines.append(json.dumps({"text": text(doc)}, ensure_ascii=False))
        written += len(lines[-1].encode()) + 1
        if written >= size:
            break
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--bytes", type=int, default=150_000)
    parser.add_argument("--out", help="a file; without it, a sample goes to the terminal")
    args = parser.parse_args()
    if args.out:
        write_heldout(args.out, args.seed, args.bytes)
    else:
        for _, doc in zip(range(20), documents(args.seed)):
            print(text(doc), end="\n\n")
