"""Pickles that try to run code, to allocate without limit, or to read memory outside their data."""

from __future__ import annotations

import collections
import os
import pickle
import random

import torch

from tests.fuzz.checkpoints import WEIGHTS, Files, dump


class CallsSystem:
    def __reduce__(self):
        return os.system, ("touch hacked",)


class Opens:
    def __reduce__(self):
        return open, ("hacked", "w")


class Evaluates:
    def __reduce__(self):
        return eval, ("open('hacked', 'w')",)


class Allocates:
    def __reduce__(self):
        return bytearray, (1 << 40,)


def typed_storage(count: int) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(
        wrap_storage=torch.zeros(count).untyped_storage(), dtype=torch.float32, _internal=True
    )


class RebuildsBeyondItsStorage:
    size = (1 << 20, 1 << 20)

    def __reduce__(self):
        return torch._utils._rebuild_tensor_v2, (
            typed_storage(1),
            0,
            self.size,
            (self.size[1], 1),
            False,
            collections.OrderedDict(),
        )


class RebuildsALittleBeyondItsStorage(RebuildsBeyondItsStorage):
    """A tensor slightly beyond its storage. A reader that grows the storage would expose uninitialised memory."""

    size = (99, 32)


class RebuildsBeforeItsStorage:
    def __reduce__(self):
        return torch._utils._rebuild_tensor_v2, (typed_storage(4), -100, (4,), (1,), False, collections.OrderedDict())


class RebuildsOnMeta:
    def __reduce__(self):
        return torch._utils._rebuild_meta_tensor_no_storage, (torch.float32, (1 << 40, 1 << 20), (1 << 20, 1), False)


HOSTILE = [
    CallsSystem, Opens, Evaluates, Allocates, RebuildsBeyondItsStorage, RebuildsALittleBeyondItsStorage,
    RebuildsBeforeItsStorage, RebuildsOnMeta,
]  # fmt: skip


def hostile_pickle(rng: random.Random, files: Files) -> str:
    """Writes a .bin whose pickle tries to run code, allocates without limit, or is not a dictionary of tensors."""
    for name in [name for name in files if name.endswith((*WEIGHTS, ".index.json"))]:
        del files[name]
    what = rng.choice(HOSTILE)
    content = rng.choice(
        [what(), {"model.embed_tokens.weight": what()}, {what.__name__: torch.zeros(2), "x": what()}, [what()]]
    )
    how = rng.choice(["bin", "bin-legacy", "plain pickle"])
    files["pytorch_model.bin"] = pickle.dumps(content) if how == "plain pickle" else dump(how, content)
    return f"pytorch_model.bin: {how} of {what.__name__}"
