"""`pace env`: what pace found on this machine, what it chose, and why. Read it first when pace is slow."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from pace import __version__, env
from pace.memory import ROOT, available_memory_bytes, machine_memory_bytes, memory_limits

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "numpy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(arguments: argparse.Namespace) -> int:
    report = collect()
    print(json.dumps(report, indent=2) if arguments.json else as_text(report))
    return 0 if report["instruction_set"]["chosen"] and report["threads"]["default"] else 1


def collect() -> dict[str, Any]:
    """Returns everything that `pace env` reports, as plain dicts; sizes are in bytes. PACE_ISA, PACE_NUM_THREADS or
    PACE_PIN_THREADS may ask for something impossible. Then `instruction_set.chosen` or `threads.default` is None,
    and `reason` explains why."""
    from pace import _C

    cpu = _C.cpu_info()
    return {
        "pace": __version__,
        "python": platform.python_version(),
        "system": _system(),
        "cpu": {"model_name": cpu["model_name"], "features": cpu["features"].split()},
        "instruction_set": _instruction_set(_C),
        "threads": {
            **_threads(cpu),
            "physical_cores": cpu["physical_cores"],
            "logical_cpus": cpu["logical_cpus"],
            "numa_nodes": cpu["numa_nodes"],
            "quota_cpus": cpu["quota_cpus"] or None,
            "quota_source": cpu["quota_source"] or None,
        },
        "memory": memory(),
        "versions": _versions(),
        "variables": {
            variable.name: {"value": variable.shown, "default": variable.default, "meaning": variable.meaning}
            for variable in env.VARIABLES
        },
    }


def as_text(report: dict[str, Any]) -> str:
    """Formats the report for a reader."""
    isa, threads, memory = report["instruction_set"], report["threads"], report["memory"]
    limit = (
        f"limited to {_gib(memory['limit_bytes'])} by {memory['limit_source']}"
        if memory["limit_bytes"]
        else "no limit set for this process"
    )
    lines = [
        ("pace", f"{report['pace']}, Python {report['python']}, {report['system']}"),
        ("CPU", report["cpu"]["model_name"]),
        ("features", " ".join(report["cpu"]["features"]) or "none beyond SSE2"),
        ("instruction set", f"{isa['chosen'] or 'none'}: {isa['reason']}"),
        ("", f"available: {', '.join(isa['available'])}"),
        ("", f"in this build: {', '.join(isa['built'])}"),
        ("threads", f"{threads['default'] or 'none'}: {threads['reason']}"),
        (
            "",
            (
                f"{_pinning(threads['pinned_cpus'])}; {threads['numa_nodes']} NUMA "
                f"node{'s' if threads['numa_nodes'] > 1 else ''}"
            ),
        ),
        ("memory", f"{_gib(memory['available_bytes'])} available of {_gib(memory['total_bytes'])}; {limit}"),
        ("versions", ", ".join(f"{name} {version or 'not installed'}" for name, version in report["versions"].items())),
    ]
    for name, variable in report["variables"].items():
        state = "not set" if variable["value"] is None else repr(variable["value"])
        lines.append((name, f"{state} ({variable['meaning']}; default: {variable['default']})"))
    return "\n".join(f"{title:16} {text}" for title, text in lines)


def memory(root: Path = ROOT) -> dict[str, Any]:
    """Returns bytes, from files below `root`: the total, what this process may still take, and the
    tightest limit with its source (None: no limit)."""
    total, _ = machine_memory_bytes(root)
    tightest = min(memory_limits(root), key=lambda limit: limit.limit_bytes, default=None)
    if tightest is not None and total is not None and tightest.limit_bytes >= total:
        tightest = None
    return {
        "total_bytes": total,
        "available_bytes": available_memory_bytes(root),
        "limit_bytes": tightest and tightest.limit_bytes,
        "limit_source": tightest and tightest.source,
    }


def _threads(cpu: dict[str, Any]) -> dict[str, Any]:
    """Returns the number of threads without `num_threads`, the reason, and the CPUs they are pinned to. `default` is
    None if an environment variable has an invalid value."""
    from pace import _C

    default, reason, pinned = cpu["default_threads"], cpu["threads_reason"], None
    try:
        if asked := env.num_threads():
            default, reason = asked, f"PACE_NUM_THREADS asks for it (without it {default}: {reason})"
        if env.pin_threads():
            pinned = _C.cpus_to_pin(default)
    except ValueError as error:
        default, reason = None, str(error)
    return {"default": default, "reason": reason, "pinned_cpus": pinned}


def _instruction_set(extension) -> dict[str, Any]:
    """Returns the instruction set in use and why, the sets that this CPU supports, and those in this build."""
    found = {"available": extension.available_isas(), "built": extension.built_isas(), "best": extension.best_isa()}
    forced = env.value("PACE_ISA")
    try:
        chosen = extension.isa()
    except ValueError as error:
        return {"chosen": None, "reason": f"PACE_ISA={forced}: {error}", **found}
    if forced:
        reason = "PACE_ISA asks for it"
    elif found["best"] in found["built"]:
        reason = "the best that this CPU has"
    else:
        reason = f"the best of this build; this CPU has {found['best']}: build with PACE_TABLES=all"
    return {"chosen": chosen, "reason": reason, **found}


def _pinning(cpus: list[int] | None) -> str:
    return f"pinned to CPUs {', '.join(map(str, cpus))}" if cpus else "not pinned"


def _gib(num_bytes: int | None) -> str:
    return "an unknown amount" if num_bytes is None else f"{num_bytes / 2**30:.1f} GiB"


def _system() -> str:
    """Returns what `platform.platform()` does, without starting a process."""
    system, libc = os.uname(), " ".join(platform.libc_ver()).strip()
    return "-".join(
        [system.sysname, system.release, system.machine, *(["with", libc.replace(" ", "")] if libc else [])]
    )


def _versions() -> dict[str, str | None]:
    """Versions of the packages in use, read from the names of `.dist-info` folders. Only packages missing there go
    through importlib.metadata, which takes longer than the rest of this report."""
    found: dict[str, str] = {}
    for folder in sys.path:
        with suppress(OSError):
            for name, _, rest in (entry.partition("-") for entry in os.listdir(folder or ".")):
                if rest.endswith(".dist-info"):
                    found.setdefault(name.lower(), rest.removesuffix(".dist-info"))
    return {package: found.get(package) or _version(package) for package in PACKAGES}


def _version(package: str) -> str | None:
    import importlib.metadata

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
