"""Hugging Face causal language models on any x86-64 CPU: `from pace.llm import LLMModel, SamplingConfig`.

Importing `pace` is instant and imports neither torch nor the C++ extension, so that `pace --help` answers at once.
"""

__version__ = "0.1.0"
