"""Hugging Face causal language models on any x86-64 CPU: `from pace.llm import LLMModel, SamplingConfig`.

Importing `pace` alone is instant and imports neither torch nor the C++ extension, so that `pace --help` answers at once.
"""

import logging

__version__ = "0.1.0"

logging.getLogger(__name__).addHandler(logging.NullHandler())  # a library is quiet until its user asks for the log
