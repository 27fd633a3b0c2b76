"""Steps that fail at any line of their code, and checks of the state afterwards."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType

from pace.llm.engine.engine import Engine
from pace.llm.sequence import Sequence
from tests.llm.fake_model import greedy
from tests.support import raises_before_line


class WatchedEngine(Engine):
    """An engine stepped by hand that records which sequences a failed step worked on."""

    error: BaseException | None = None
    worked_on: tuple[Sequence, ...] = ()
    """Sequences of the failed step, without those that it finished before it failed."""

    def finish(self) -> None:
        """Steps until no work is left."""
        self.cache.check_integrity(self.scheduler.sequences())
        while self.step():
            self.cache.check_integrity(self.scheduler.sequences())

    def check_outcomes(self, sequences: list[Sequence]) -> list[Sequence]:
        """Checks the `sequences`, which end with token 0, and returns those that failed. Raises AssertionError unless
        exactly those of the failed step failed, the others are right, and nothing is leaked."""
        failed = [sequence for sequence in sequences if sequence.finish_reason == "error"]
        assert failed == [sequence for sequence in sequences if sequence in self.worked_on]
        for sequence in sequences:
            expected = greedy(
                self.model,
                sequence.tokens[: sequence.num_prompt_tokens],
                sequence.max_length - sequence.num_prompt_tokens,
                (0,),
            )
            if sequence in failed:
                assert sequence.error is self.error and sequence.generated == expected[: sequence.num_generated]
            else:
                assert sequence.error is None and sequence.generated == expected
        self.check_idle()
        assert self.cache.used_bytes == self.drafter.memory().cache_used == 0
        return failed

    def _recover(self, error: BaseException) -> None:
        self.error = error
        self.worked_on = tuple(span.sequence for span in self._under_way if not span.sequence.is_finished)
        super()._recover(error)


def fails_before_line(number: int, engine: WatchedEngine, within: Callable[[CodeType], bool]) -> bool:
    """Steps `engine` until it is done, and raises an error before the number-th executed line of functions that
    `within` accepts. False if fewer lines were executed."""

    def step_to_the_end() -> None:
        while engine.step():
            pass

    return raises_before_line(number, RuntimeError("planted"), step_to_the_end, within)


def in_files(*names: str) -> Callable[[CodeType], bool]:
    """Returns a predicate: True for code of functions that are defined in files of these names."""
    return lambda code: code.co_filename.endswith(tuple(f"/{name}" for name in names))
