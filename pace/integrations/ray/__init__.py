"""pace on Ray: `serve run pace.integrations.ray:app`, and `Predictor` for `map_batches` (docs/scaling.md).

Names are imported on first use: a replica needs no Ray Data, and the HTTP ingress needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

try:
    import ray as _ray
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f'{error}; several machines need it: pip install "pace-llm[ray]"') from None
if (found := tuple(map(int, _ray.__version__.split(".")[:2]))) < (2, 60) or found >= (3, 0):
    raise ImportError(
        f"pace works with ray 2.60 and later ones of 2, and {_ray.__version__} is installed: "
        "pip install 'ray[data,serve]>=2.60,<3'"
    )

if TYPE_CHECKING:
    from pace.integrations.ray.application import app
    from pace.integrations.ray.predictor import Predictor

_HOMES = {"app": "application", "Predictor": "predictor"}

__all__ = ["Predictor", "app"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
