"""Tasks about a text: fields of a made-up fact as JSON, and questions about a few facts."""

import json

from facts import ADJECTIVES, CITIES, DAYS, ITEMS, JOBS, MONTHS, NOUNS
from stories import ANIMALS, COLOURS, name, pseudo_word, with_article


def _place(rng):
    return rng.choice(CITIES) if rng.random() < 0.7 else pseudo_word(rng).capitalize()


def record(rng):
    """(fields, sentence): one made-up fact with names for its parts; every field stands in the sentence as written."""
    who, other = name(rng, unseen=0.45), name(rng, unseen=0.45)
    place, place2 = _place(rng), _place(rng)
    if rng.random() < 0.2:
        who = f"{who} {pseudo_word(rng).capitalize()}"
    age, year, n = rng.randint(1, 99), rng.randint(1800, 2029), rng.randint(2, 60)
    hour = f"{rng.randint(0, 23)}:{rng.choice(['00', '15', '30', '45'])}"
    job, item, colour, day, month = (
        rng.choice(JOBS),
        rng.choice(ITEMS),
        rng.choice(COLOURS),
        rng.choice(DAYS),
        rng.choice(MONTHS),
    )
    if rng.random() < 0.15:
        item, job = pseudo_word(rng), pseudo_word(rng)
    animal, price = rng.choice(ANIMALS), rng.randint(1, 999)
    title = " ".join(rng.choice(NOUNS + ADJECTIVES).capitalize() for _ in range(rng.randint(1, 3)))
    kind = rng.choice("person person person job thing meeting pet book order trip letter".split())
    if kind == "person":
        return dict(name=who, age=age, city=place), rng.choice(
            [
                f"{who} is {age} years old and lives in {place}.",
                f"My name is {who}, I am {age} years old and I live in {place}.",
                f"In {place} lives {who}, who is {age} years old.",
                f"{who}, {age}, is from {place}.",
                f"{who} ({age}) lives in {place}.",
                f"I am {who} from {place} and I am {age}.",
            ]
        )
    if kind == "job":
        return dict(name=who, job=job, city=place, age=age), rng.choice(
            [
                f"{who} works as {with_article(job)} in {place} and is {age} years old.",
                f"The {age} year old {job} {who} lives in {place}.",
                f"{who} is {with_article(job)} from {place}, aged {age}.",
            ]
        )
    if kind == "thing":
        return dict(item=item, colour=colour, price=price), rng.choice(
            [
                f"The {colour} {item} costs {price} euros.",
                f"We sell {with_article(colour)} {item} for {price} dollars.",
                f"For sale: {item}, {colour}, price {price}.",
                f"{other} paid {price} euros for the {colour} {item}.",
            ]
        )
    if kind == "meeting":
        return dict(name=who, day=day, time=hour, city=place), rng.choice(
            [
                f"We meet {who} on {day} at {hour} in {place}.",
                f"The meeting with {who} is on {day} at {hour} in {place}.",
                f"On {day}, {who} will be in {place} at {hour}.",
            ]
        )
    if kind == "pet":
        return dict(name=who, animal=animal, age=age, owner=other), rng.choice(
            [
                f"{other} has {with_article(animal)} called {who}, which is {age} years old.",
                f"{who} is the {animal} of {other} and is {age} years old.",
                f"{who}, the {age} year old {animal}, belongs to {other}.",
            ]
        )
    if kind == "book":
        return dict(title=title, author=who, year=year), rng.choice(
            [
                f"{who} wrote the book {title} in {year}.",
                f"The book {title} by {who} came out in {year}.",
                f'"{title}" was written by {who} in {year}.',
            ]
        )
    if kind == "order":
        return dict(name=who, item=item, quantity=n), rng.choice(
            [
                f"{who} orders {n} pieces of the {item}.",
                f"Please send {n} of the {item} to {who}.",
                f"{who} bought the {item} {n} times.",
                f"Order from {who}: {n} x {item}.",
            ]
        )
    if kind == "trip":
        return {"from": place, "to": place2, "day": day, "time": hour}, rng.choice(
            [
                f"The train from {place} to {place2} leaves on {day} at {hour}.",
                f"On {day} at {hour} we fly from {place} to {place2}.",
                f"A bus goes from {place} to {place2} every {day} at {hour}.",
            ]
        )
    address = f"{who.split()[0].lower()}@{pseudo_word(rng)}.{rng.choice(['com', 'org', 'net'])}"
    return dict(name=who, email=address, month=month), rng.choice(
        [
            f"In {month} we wrote to {who} at {address}.",
            f"{who} ({address}) has been a member since {month}.",
            f"{who} joined in {month}. Mail: {address}",
        ]
    )


def extraction(rng):
    fields, text = record(rng)
    keys = list(fields)
    chosen = sorted(rng.sample(keys, rng.randint(1, min(3, len(keys)))), key=keys.index)
    if rng.random() < 0.3:
        rng.shuffle(chosen)
    wanted = chosen[0] if len(chosen) == 1 else ", ".join(chosen[:-1]) + " and " + chosen[-1]
    ask = [
        "Extract the {} as JSON: {}",
        "Extract the {} as JSON: {}",
        "Extract {} as JSON: {}",
        "Give me the {} as JSON: {}",
        "Extract the {} as JSON.\n{}",
        "Find the {} and answer in JSON: {}",
        "Return the {} as JSON.\nText: {}",
    ]
    return rng.choice(ask).format(wanted, text), json.dumps({k: fields[k] for k in chosen}, ensure_ascii=False)


def reading(rng):
    """A few facts, then a question about one of them."""
    people = []
    while len(people) < rng.randint(2, 4):
        who = name(rng, unseen=0.3)
        if who not in people:
            people.append(who)
    things = rng.sample(ITEMS if rng.random() < 0.4 else NOUNS, len(people))
    colours = rng.sample(COLOURS, len(people))
    places = rng.sample(["kitchen", "garden", "school", "park", "library", "station", "office", "market"], len(people))
    i = rng.randrange(len(people))
    form = rng.choice(["has", "has", "where", "where", "colour", "field"])
    if form == "has":
        facts = [f"{p} has {with_article(t)}." for p, t in zip(people, things)]
        question, answer = rng.choice(
            [
                (f"Who has the {things[i]}?", f"{people[i]} has the {things[i]}."),
                (f"What does {people[i]} have?", f"{people[i]} has {with_article(things[i])}."),
            ]
        )
    elif form == "where":
        facts = [f"{p} is in the {q}." for p, q in zip(people, places)]
        question, answer = rng.choice(
            [
                (f"Where is {people[i]}?", f"{people[i]} is in the {places[i]}."),
                (f"Who is in the {places[i]}?", f"{people[i]} is in the {places[i]}."),
            ]
        )
    elif form == "colour":
        facts = [f"The {t} is {c}." for t, c in zip(things, colours)]
        question, answer = rng.choice(
            [
                (f"What colour is the {things[i]}?", f"The {things[i]} is {colours[i]}."),
                (f"What is {colours[i]}?", f"The {things[i]} is {colours[i]}."),
            ]
        )
    else:
        fields, text = record(rng)
        key = rng.choice(list(fields))
        return rng.choice(
            [f"{text} What is the {key}?", f"Text: {text}\nWhat is the {key}?"]
        ), f"The {key} is {fields[key]}."
    return rng.choice(
        [
            f"{' '.join(facts)} {question}",
            f"Read this: {' '.join(facts)}\n{question}",
            f"{' '.join(facts)}\nQuestion: {question}",
        ]
    ), answer
