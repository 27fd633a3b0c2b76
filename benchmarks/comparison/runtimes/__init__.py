"""The runtimes by name, pace first. To add one, write one file and one line here."""

from __future__ import annotations

from benchmarks.comparison.runtimes.amd_pace_runtime import AmdPace
from benchmarks.comparison.runtimes.base import Runtime, Timing, Variant
from benchmarks.comparison.runtimes.ctranslate2_runtime import CTranslate2
from benchmarks.comparison.runtimes.ik_llama_cpp_runtime import IkLlamaCpp
from benchmarks.comparison.runtimes.llama_cpp_runtime import LlamaCpp
from benchmarks.comparison.runtimes.onnxruntime_runtime import OnnxRuntime
from benchmarks.comparison.runtimes.openvino_runtime import OpenVINO
from benchmarks.comparison.runtimes.pace_runtime import Pace
from benchmarks.comparison.runtimes.transformers_runtime import Transformers
from benchmarks.comparison.runtimes.vllm_runtime import Vllm

RUNTIMES: dict[str, type[Runtime]] = {
    runtime.name: runtime
    for runtime in (Pace, Transformers, LlamaCpp, IkLlamaCpp, Vllm, AmdPace, OpenVINO, OnnxRuntime, CTranslate2)
}

__all__ = ["RUNTIMES", "Runtime", "Timing", "Variant"]
