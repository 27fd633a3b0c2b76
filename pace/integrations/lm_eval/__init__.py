"""lm-eval's tasks on a model of pace, in one process: `python -m pace.integrations.lm_eval --model pace ...`
(docs/integrations.md). Importing this registers the model type "pace"."""

try:
    import lm_eval as _lm_eval  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f'{error}; evaluations need it: pip install "pace-llm[lm-eval]"') from None

from pace.integrations.lm_eval.model import PaceLM

__all__ = ["PaceLM"]
