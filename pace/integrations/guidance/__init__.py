"""pace as a model for guidance's programs: `from pace.integrations.guidance import Pace` (docs/guidance.md)."""

try:
    import guidance as _guidance
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f'{error}; programs of guidance need it: pip install "pace-llm[guidance]"') from None
if not _guidance.__version__.startswith("0.3."):
    raise ImportError(
        f"pace works with guidance 0.3, and {_guidance.__version__} is installed: pip install 'guidance>=0.3,<0.4'"
    )

from pace.integrations.guidance.model import Pace

__all__ = ["Pace"]
