"""Reasoning before an answer: its markers, and detecting if a prompt has begun it."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Reasoning:
    """Markers around reasoning. Both are text without whitespace at their ends, and contain special tokens by name."""

    opening: str
    closing: str
    begun: bool = False
    """True if the prompt ends within reasoning, so that the turn begins in it."""
    repeats: bool = False
    """True if several pieces of reasoning may follow each other. The closing marker is then also the beginning of any
    message of the assistant, so it means nothing at the end of a prompt."""

    def after(self, prompt: str) -> Reasoning | None:
        """Returns the markers for a turn after `prompt`, with `begun` set if it ends with the opening marker. None if
        it ends with the closing marker, so that reasoning is over."""
        prompt = prompt.rstrip()
        if prompt.endswith(self.closing) and not self.repeats:
            return None
        return replace(self, begun=prompt.endswith(self.opening))


THINK = Reasoning("<think>", "</think>")
SEED_THINK = Reasoning("<seed:think>", "</seed:think>")
MISTRAL_THINK = Reasoning("[THINK]", "[/THINK]")
COMMAND_THINKING = Reasoning("<|START_THINKING|>", "<|END_THINKING|>")
APERTUS_INNER = Reasoning("<|inner_prefix|>", "<|inner_suffix|>")
HUNYUAN_THINK = Reasoning("<think:opensource>", "</think:opensource>")
SOLAR_THINK = Reasoning("<|think|>", "<|end|><|begin|>assistant", repeats=True)
GEMMA_THOUGHT = Reasoning("<|channel>thought", "<channel|>")
HARMONY_ANALYSIS = Reasoning("<|channel|>analysis<|message|>", "<|end|><|start|>assistant", repeats=True)

_BY_FRAGMENT = {
    "<|channel|>analysis<|message|>": HARMONY_ANALYSIS,
    "<|channel>thought": GEMMA_THOUGHT,
    "<|begin|>assistant<|think|>": SOLAR_THINK,
    "<|inner_prefix|>": APERTUS_INNER,
    ":opensource": HUNYUAN_THINK,
    "<|START_THINKING|>": COMMAND_THINKING,
    "[THINK]": MISTRAL_THINK,
    "<seed:think>": SEED_THINK,
    "</think>": THINK,
    "<think>": THINK,
}


def detect_reasoning(template: str) -> Reasoning | None:
    """Returns the reasoning markers of models with this chat template; None if it has none."""
    return next((found for fragment, found in _BY_FRAGMENT.items() if fragment in template), None)
