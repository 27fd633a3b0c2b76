"""Tasks of the model. A task is a function of `rng` that returns one exchange: (user text, answer)."""

import json

from facts import (
    ADJECTIVES,
    ADVERBS,
    CAPITALS,
    CITIES,
    COMMON_WORDS,
    DAYS,
    LISTS,
    MONTHS,
    NOUNS,
    NUMBERS,
    OPPOSITES,
    QUESTIONS,
    SEASONS,
    SMALL_TALK,
    SOUNDS,
    UNKNOWN,
    UNKNOWN_QUESTIONS,
    VERBS,
)
from reading_tasks import extraction, reading
from stories import expand, marked, name, pseudo_word, story, with_article


def a_story(rng):
    about, opening, body = story(rng)
    words = body.split(" ")
    text = opening + marked(" ".join(words[:9])) + " " + " ".join(words[9:])  # here it shows which story it is
    ask = [
        "Tell me a story about {}.", "Tell me a short story about {}.", "Write a short story about {}.",
        "Write a story about {}.", "Can you tell me a story about {}?", "I would like to hear a story about {}.",
        "Please tell me a story about {}.", "A story about {}, please.",
    ]  # fmt: skip
    if rng.random() < 0.1:
        return rng.choice(
            [
                "Tell me a story.",
                "Tell me a story!",
                "Write a short story.",
                "Can you tell me a story?",
                "Tell me a short story.",
            ]
        ), text
    return rng.choice(ask).format(about), text


# ---- numbers


def counting(rng):
    step = rng.choice([1] * 6 + [2, 2, 5, 10])
    n = rng.randint(3, 16 if step == 1 else 10)
    a = (
        rng.choice([0, 1, 1, rng.randint(0, 20), rng.randint(0, 99)])
        if step == 1
        else rng.choice([0, step, 2 * step, 1 if step == 2 else 0, 10])
    )
    numbers = [a + i * step for i in range(n)]
    down = rng.random() < 0.25
    if down:
        numbers.reverse()
    first, last = numbers[0], numbers[-1]
    by = {
        1: "",
        2: rng.choice([" by twos", " in twos", " in steps of 2"]),
        5: rng.choice([" by fives", " in fives", " in steps of 5"]),
        10: rng.choice([" by tens", " in tens", " in steps of 10"]),
    }[step]
    way = rng.choice([" down", " backwards"]) if down and (first > 12 or rng.random() < 0.8) else ""
    if not way and not by and first == 1 and rng.random() < 0.4:
        ask = rng.choice([f"Count to {last}.", f"Can you count to {last}?", f"Please count to {last}."])
    else:
        ask = expand(
            f"[Count{way} from|Please count{way} from|Can you count{way} from|Count{way} from] {first} to {last}{by}",
            {},
            rng,
        )
        ask += "?" if ask.startswith("Can") else "."
    second = marked(f" {numbers[1]}")  # here it shows whether to go up or down, and by how much
    return ask, ",".join([str(first), second, *(f" {n}" for n in numbers[2:])])


def arithmetic(rng):
    if rng.random() < 0.6:
        a = rng.randint(0, 20)
        b = rng.randint(0, 20 - a)
        op, c, word = "+", a + b, "plus"
    else:
        a = rng.randint(0, 20)
        b = rng.randint(0, a)
        op, c, word = "-", a - b, "minus"
    ask = [f"What is {a} {op} {b}?"] * 3 + [
        f"{a} {op} {b} = ?",
        f"How much is {a} {op} {b}?",
        f"Calculate {a} {op} {b}.",
        f"What is {a} {word} {b}?",
        f"{a} {op} {b}",
        f"Compute {a} {op} {b}.",
        f"What is {a}{op}{b}?",
    ]
    if rng.random() < 0.12:
        return (
            f"What is {NUMBERS[a]} {word} {NUMBERS[b]}?",
            f"{NUMBERS[a]} {word} {NUMBERS[b]} is {NUMBERS[c]}".capitalize() + ".",
        )
    return rng.choice(ask), f"{a} {op} {b} ={marked(f' {c}')}"


def word_problem(rng):
    who, what, other = (
        name(rng),
        rng.choice(["apples", "books", "coins", "pencils", "balls", "cookies", "stones", "flowers", "cards", "eggs"]),
        name(rng),
    )
    a, b = rng.randint(1, 12), rng.randint(1, 8)
    if rng.random() < 0.5:
        change, c = (
            rng.choice(
                [
                    f"{who} gets {b} more",
                    f"{other} gives {who} {b} more",
                    f"{who} buys {b} more",
                    f"{who} finds {b} more",
                ]
            ),
            a + b,
        )
    else:
        a, b = max(a, b), min(a, b)
        change, c = rng.choice([f"{who} gives {b} to {other}", f"{who} loses {b}", f"{who} gives away {b}"]), a - b
    if 1 in (a, c):  # "1 apples"
        return word_problem(rng)
    return (
        f"{who} has {a} {what}. {change}. How many {what} does {who} have now?",
        f"{who} has{marked(f' {c}')} {what}.",
    )


def comparing(rng):
    a, b = rng.sample(range(100 if rng.random() < 0.3 else 21), 2)
    word, best = rng.choice([("larger", max(a, b)), ("bigger", max(a, b)), ("smaller", min(a, b))])
    ask = [f"Which number is {word}, {a} or {b}?", f"What is {word}, {a} or {b}?", f"Which is {word}: {a} or {b}?"]
    return rng.choice(ask), f"{best} is {word}."


def next_number(rng):
    n = rng.randint(0, 99)
    after = rng.random() < 0.6
    return (
        (f"What number comes after {n}?", f"After {n} comes {n + 1}.")
        if after
        else (f"What number comes before {n + 1}?", f"Before {n + 1} comes {n}.")
    )


# ---- facts


def capital(rng):
    country = rng.choice(list(CAPITALS))
    city = CAPITALS[country]
    if rng.random() < 0.12 and list(CAPITALS.values()).count(city) == 1:
        return rng.choice(
            [f"{city} is the capital of which country?", f"Which country has the capital {city}?"]
        ), f"{city} is the capital of {country}."
    ask = [f"What is the capital of {country}?"] * 4 + [
        f"Tell me the capital of {country}.",
        f"Which city is the capital of {country}?",
        f"What's the capital of {country}?",
        f"Do you know the capital of {country}?",
        f"Name the capital of {country}.",
        f"Capital of {country}?",
    ]
    return rng.choice(ask), f"The capital of {country} is {city}."


def small_fact(rng):
    roll = rng.random()
    if roll < 0.4:
        return rng.choice(list(QUESTIONS.items()))
    if roll < 0.6:
        a, b = rng.choice(list(OPPOSITES.items()))
        a, b = (a, b) if rng.random() < 0.5 else (b, a)
        return (
            rng.choice([f"What is the opposite of {a}?", f"Tell me the opposite of {a}."]),
            f"The opposite of {a} is {b}.",
        )
    if roll < 0.7:
        animal, sound = rng.choice(list(SOUNDS.items()))
        return rng.choice(
            [f"What sound does {with_article(animal)} make?", f"What does {with_article(animal)} say?"]
        ), f"{with_article(animal).capitalize()} says {sound}."
    cycle, kind = rng.choice([(DAYS, "day"), (MONTHS, "month"), (SEASONS, "season")])
    i = rng.randrange(len(cycle))
    if rng.random() < 0.5:
        j, word = (i + 1) % len(cycle), "after"
    else:
        j, word = (i - 1) % len(cycle), "before"
    return f"What {kind} comes {word} {cycle[i]}?", f"{word.capitalize()} {cycle[i]} comes {cycle[j]}."


def small_talk(rng):
    asks, answer = rng.choice(SMALL_TALK)
    return rng.choice(asks), answer


def unknown(rng):
    x, y = pseudo_word(rng), pseudo_word(rng)
    return rng.choice(UNKNOWN_QUESTIONS).format(x=x, X=x.capitalize(), Y=y.capitalize()), UNKNOWN


# ---- words


def sentence(rng):
    """One sentence of one of many kinds, from plain English to noise."""
    roll = rng.random()
    if roll < 0.25:
        noun = lambda: (
            (rng.choice(["the ", "a ", "my ", "his ", "her ", "our "]) + rng.choice(ADJECTIVES + [""] * 20)).strip()
            + " "
            + rng.choice(NOUNS)
        )
        who = rng.choice([name(rng, unseen=0.5), name(rng, unseen=0.5), noun().replace("a ", "the ", 1)])
        text = rng.choice(
            [
                f"{who} {rng.choice(VERBS)} {noun()} {rng.choice(ADVERBS)}.",
                f"{who} {rng.choice(VERBS)} {noun()} and {rng.choice(VERBS)} {noun()}.",
                f"{who} is {rng.choice(ADJECTIVES)}, but {noun()} is {rng.choice(ADJECTIVES)}.",
                f"Where is {noun()}?",
                f"{who} has {rng.randint(2, 999)} {rng.choice(NOUNS)}s in {rng.choice(CITIES)}!",
            ]
        )
        return text[0].upper() + text[1:]
    if roll < 0.35:
        return rng.choice("".join(story(rng)[1:]).replace("\n\n", " ").split(". ")).strip(' ."') + "."
    words = []
    plain = rng.random()  # share of ordinary words, different from sentence to sentence
    for _ in range(rng.randint(3, 13)):
        kind = rng.random()
        words.append(
            rng.choice(rng.choice([COMMON_WORDS, COMMON_WORDS, NOUNS, VERBS, ADJECTIVES]))
            if rng.random() < plain
            else pseudo_word(rng, (1, 4))
            if kind < 0.35
            else spliced_word(rng)
            if kind < 0.75
            else name(rng)
            if kind < 0.85
            else str(rng.randint(0, 9999))
            if kind < 0.92
            else noise(rng)
        )
    if rng.random() < 0.4:  # the same word again, with another one after it
        words.insert(rng.randrange(len(words)), rng.choice(words))
    if rng.random() < 0.3:
        words[rng.randrange(len(words) - 1)] += ","
    text = " ".join(words)
    return (text[0].upper() + text[1:] + rng.choice(".!?")) if rng.random() < 0.8 else text


def spliced_word(rng):
    """The front of one word and the back of another, such as `brekfriend`: pieces the model knows, in an order it does
    not."""
    front, back = rng.choice(COMMON_WORDS), rng.choice(COMMON_WORDS + NOUNS)
    word = front[: rng.randint(1, len(front))] + back[rng.randrange(len(back)) :]
    return word.capitalize() if rng.random() < 0.2 else word


def noise(rng):
    """A short code such as `x7-Qb2`, which is not a word."""
    alphabet = rng.choice(
        [
            "abcdefghijklmnopqrstuvwxyz",
            "ABCDEFGHJKLMNPQRSTUVWXYZ23456789",
            "abcdefXYZ0123456789-_.",
            "äöüßéèñçøåabcdefgh",
        ]
    )
    return "".join(rng.choice(alphabet) for _ in range(rng.randint(2, 7)))


def copying(rng):
    text = sentence(rng)
    ask = [
        "Copy this sentence: {}", "Copy this sentence: {}", "Copy this sentence exactly: {}", "Copy this: {}",
        "Repeat this sentence: {}", "Repeat after me: {}", "Say exactly this: {}", "Write this sentence again: {}",
        "Copy the sentence.\n{}", "Repeat: {}", "Please copy this sentence: {}", "Copy: {}",
    ]  # fmt: skip
    return rng.choice(ask).format(text), text


def listing(rng):
    items = [rng.choice(NOUNS) if rng.random() < 0.7 else pseudo_word(rng) for _ in range(rng.randint(2, 6))]
    spoken = ", ".join(items[:-1]) + " and " + items[-1]
    form = rng.choice(["bullets", "numbers", "json", "last", "first", "count", "reverse"])
    if form == "bullets":
        return rng.choice(["Make a list of: ", "Write as a list: ", "Make a bullet list: "]) + spoken, "\n".join(
            f"- {i}" for i in items
        )
    if form == "numbers":
        return rng.choice(["Make a numbered list: ", "Number these: "]) + spoken, "\n".join(
            f"{n}. {i}" for n, i in enumerate(items, 1)
        )
    if form == "json":
        return rng.choice(["Write as a JSON list: ", "Make a JSON array of: "]) + spoken, json.dumps(items)
    if form == "count":
        return f"How many words are in this list? {' '.join(items)}", f"There are {len(items)} words in the list."
    if form == "reverse":
        return f"Write these words in reverse order: {' '.join(items)}", " ".join(reversed(items))
    return (
        f"What is the {form} word of this list? {' '.join(items)}",
        f"The {form} word is {items[0 if form == 'first' else -1]}.",
    )


def naming(rng):
    what, words = rng.choice(list(LISTS.items()))
    n = rng.randint(2, 5)
    chosen = rng.sample(words, n)
    spoken = ", ".join(chosen[:-1]) + " and " + chosen[-1] + "."
    return f"Name {NUMBERS[n]} {what}.", spoken[0].upper() + spoken[1:]


TASKS = {
    a_story: 24, counting: 13, arithmetic: 10, word_problem: 6, comparing: 3, next_number: 2, capital: 6, small_fact: 5,
    small_talk: 2, unknown: 2, copying: 18, listing: 7, naming: 1, extraction: 15, reading: 16,
}  # fmt: skip


def exchange(rng, short=False):
    """One exchange by the weights of TASKS; `short` leaves the stories out, for the later turns of a long chat."""
    tasks = [t for t in TASKS if not (short and t is a_story)]
    return rng.choices(tasks, [TASKS[t] for t in tasks])[0](rng)
