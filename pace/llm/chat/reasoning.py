"""What a model thinks before it answers: how it is marked, and whether a prompt has begun it."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Reasoning:
    """Markers around a thought. Both are text without whitespace at its ends, in which special tokens stand by name."""

    opening: str
    closing: str
    begun: bool = False
    """Whether the prompt ends inside a thought, so that the turn begins in it."""
    repeats: bool = False
    """Whether thoughts may follow one another. The closing is then what begins any message of the assistant, and at the
    end of a prompt it says nothing."""

    def after(self, prompt: str) -> Reasoning | None:
        """The same for a turn that follows `prompt`: begun where it ends with the opening, None where the thought is
        over."""
        prompt = prompt.rstrip()
        if prompt.endswith(self.closing) and not self.repeats:
            return None
        return replace(self, begun=prompt.endswith(self.opening))


THINK = Reasoning("<think>", "</think>")
SEED_THINK = Reasoning("<seed:think>", "</seed:think>")
MISTRAL_THINK = Reasoning("[THINK]", "[/THINK]")
COMMAND_THINKING = Reasoning("<|START_THINKING|>", "<|END_THINKING|>")
HARMONY_ANALYSIS = Reasoning("<|channel|>analysis<|message|>", "<|end|><|start|>assistant", repeats=True)

_BY_FRAGMENT = {
    "<|channel|>analysis<|message|>": HARMONY_ANALYSIS,
    "<|START_THINKING|>": COMMAND_THINKING,
    "[THINK]": MISTRAL_THINK,
    "<seed:think>": SEED_THINK,
    "</think>": THINK,
    "<think>": THINK,
}


def detect_reasoning(template: str) -> Reasoning | None:
    """The reasoning of models with this chat template, from its text; None where it has none."""
    return next((found for fragment, found in _BY_FRAGMENT.items() if fragment in template), None)
