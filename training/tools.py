"""Chats with tools: the system prompt names them, the answer is a call as JSON, the result comes back, the model says
it in words."""

import json

from facts import CITIES, DAYS, ITEMS
from stories import name, pseudo_word
from tasks import exchange

SKY = ["sunny", "cloudy", "rainy", "windy", "snowy", "foggy"]


def _city(rng):
    return rng.choice(CITIES) if rng.random() < 0.65 else pseudo_word(rng).capitalize()


def weather(rng):
    city, sky, t = _city(rng), rng.choice(SKY), rng.randint(-9, 35)
    ask = [
        f"What is the weather in {city}?",
        f"What is the weather like in {city}?",
        f"How is the weather in {city}?",
        f"Is it raining in {city}?",
        f"Tell me the weather in {city}.",
        f"What's the weather in {city}?",
        f"Weather in {city}?",
    ]
    return (
        rng.choice(ask),
        {"city": city},
        {"weather": sky, "temperature": t},
        f"It is {sky} in {city}, and the temperature is {t} degrees.",
    )


def clock(rng):
    city, time = _city(rng), f"{rng.randint(0, 23)}:{rng.randint(10, 59)}"
    ask = [f"What time is it in {city}?", f"Tell me the time in {city}.", f"What is the time in {city}?"]
    return rng.choice(ask), {"city": city}, {"time": time}, f"It is {time} in {city}."


def add(rng):
    a, b = rng.randint(10, 999), rng.randint(10, 999)
    return (
        rng.choice([f"What is {a} + {b}?", f"Add {a} and {b}.", f"How much is {a} + {b}?"]),
        {"a": a, "b": b},
        {"result": a + b},
        f"{a} + {b} = {a + b}",
    )


def mail(rng):
    who, text = (
        name(rng, unseen=0.4),
        rng.choice(
            ["Hello", "I am late", "Thank you", "See you soon", "Happy birthday", "Please call me", "Good luck"]
        ),
    )
    return (
        rng.choice([f"Send a message to {who}: {text}", f"Write to {who}: {text}", f"Tell {who}: {text}"]),
        {"name": who, "text": text},
        {"sent": True},
        f"I sent the message to {who}.",
    )


def remind(rng):
    what, day = f"{rng.choice(['buy', 'bring', 'clean', 'repair', 'sell'])} the {rng.choice(ITEMS)}", rng.choice(DAYS)
    return (
        rng.choice([f"Remind me to {what} on {day}.", f"On {day}, remind me to {what}."]),
        {"text": what, "day": day},
        {"ok": True},
        f"I will remind you on {day}.",
    )


def play(rng):
    title = " ".join(pseudo_word(rng).capitalize() for _ in range(rng.randint(1, 2)))
    return (
        rng.choice([f"Play {title}.", f"Please play {title}.", f"Play the song {title}."]),
        {"title": title},
        {"playing": True},
        f"Now playing {title}.",
    )


def light(rng):
    room, state = rng.choice(["kitchen", "bedroom", "garden", "hall", "office", "bathroom"]), rng.choice(["on", "off"])
    return (
        rng.choice(
            [
                f"Turn {state} the light in the {room}.",
                f"Turn the {room} light {state}.",
                f"Switch {state} the {room} light.",
            ]
        ),
        {"room": room, "state": state},
        {"ok": True},
        f"The {room} light is {state}.",
    )


def search(rng):
    what = rng.choice(
        [
            pseudo_word(rng),
            f"{rng.choice(ITEMS)} shops",
            f"trains to {_city(rng)}",
            f"news about {_city(rng)}",
            name(rng, unseen=0.5),
        ]
    )
    return (
        rng.choice([f"Search for {what}.", f"Find {what} on the web.", f"Look up {what}."]),
        {"query": what},
        {"results": []},
        f"I found nothing about {what}.",
    )


TOOLS = {
    "get_weather": weather, "get_time": clock, "add": add, "send_message": mail, "set_reminder": remind,
    "play_music": play, "set_light": light, "web_search": search,
}  # fmt: skip
ARGUMENTS = {
    "get_weather": "city", "get_time": "city", "add": "a, b", "send_message": "name, text", "set_reminder": "text, day",
    "play_music": "title", "set_light": "room, state", "web_search": "query",
}  # fmt: skip


def system_prompt(names, words="You are a helpful assistant."):
    """What the chat template writes when it is given `tools`."""
    return f"{words}\nTools: " + "; ".join(f"{n}({ARGUMENTS[n]})" for n in names)


def tool_call(name, arguments):
    return "<tool_call>" + json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) + "</tool_call>"


def tool_chat(rng):
    """Messages of one chat whose system prompt offers one to four tools."""
    names = rng.sample(list(TOOLS), rng.randint(1, 4))
    messages = [{"role": "system", "content": system_prompt(names)}]
    for _ in range(rng.randint(1, 2)):
        if rng.random() < 0.2:  # nothing to call
            user, answer = exchange(rng, short=True)
            messages += [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
            continue
        tool = rng.choice(names)
        user, arguments, result, answer = TOOLS[tool](rng)
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": tool_call(tool, arguments)}]
        if rng.random() < 0.75:
            messages += [{"role": "tool", "content": json.dumps(result)}, {"role": "assistant", "content": answer}]
    return messages


def no_tool_chat(rng):
    """Asked for the weather or the time without a tool."""
    tool, thing = rng.choice([("get_weather", "the weather"), ("get_time", "the time")])
    return [
        {"role": "user", "content": TOOLS[tool](rng)[0]},
        {"role": "assistant", "content": f"I cannot look up {thing}, because I have no tool for it."},
    ]
