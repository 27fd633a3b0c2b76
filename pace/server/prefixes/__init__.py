"""Named prefixes: beginnings of prompts that are computed once, and kept in files (`pace serve --prefix-dir`)."""
