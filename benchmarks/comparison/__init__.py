"""The parts of `benchmarks/compare.py`, which compares pace with other runtimes on the same checkpoint.

checkpoint.py    A shape's config, random weights and a tokenizer, as a directory that every runtime can read.
gguf_writer.py   The same checkpoint as a GGUF file; gguf_families.py defines its contents.
convert.py       llama.cpp's converter, for families that gguf_writer does not know.
runtimes/        One class for each runtime: how to load it, start prompts, take a step.
worker.py        One runtime in a separate process, driven over a pipe.
measure.py       The schedule: groups that fit in memory, alternating runs in rounds, limits around every run.
results.py       Results as plain data; medians, shares of the limits, ratios.
targets.py       The targets, and a check of results against them.
report.py        Tables and docs/benchmarks.md; plot.py draws its pictures.
"""
