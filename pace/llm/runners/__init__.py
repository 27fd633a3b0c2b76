"""Ways to run a model's forward pass: recorded as a program, or op by op."""

from pace.llm.models.base_model import BaseModelForCausalLM
from pace.llm.operators import OperatorConfig, read_backend
from pace.llm.runners.eager import EagerRunner
from pace.llm.runners.program import ProgramRunner
from pace.llm.runners.runner import ModelRunner

__all__ = ["EagerRunner", "ModelRunner", "ProgramRunner", "make_runner"]


def make_runner(model: BaseModelForCausalLM, backend: str | OperatorConfig) -> ModelRunner:
    """Makes the runner of a loaded model: a recorded program if all operators are native, else op by op."""
    backend = read_backend(backend)
    if backend in ("native", OperatorConfig()):
        return ProgramRunner(model)
    return EagerRunner(model, backend if isinstance(backend, OperatorConfig) else None)
