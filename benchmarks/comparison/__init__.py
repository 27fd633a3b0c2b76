"""What `benchmarks/compare.py` is made of: pace beside other runtimes on the same checkpoint.

checkpoint.py    a shape's config, random weights and a tokenizer, as a directory that every runtime can read
gguf_writer.py   the same checkpoint as a GGUF file; gguf_families.py what is in it
runtimes/        one class for each runtime: how to load it, start prompts, take a step
worker.py        one runtime in a process of its own, driven over a pipe
measure.py       who runs when: groups that fit in memory, rounds in turn, limits around every run
results.py       what was measured, as data; medians, shares of the limits, ratios
targets.py       what was to be reached, and whether it was
report.py        tables, docs/benchmarks.md; plot.py its pictures
"""
