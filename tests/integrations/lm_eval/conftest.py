"""lm-eval is an extra: if it is not installed, nothing here is collected. `make conformance ARGS=lm_eval_pace` runs
these tests with lm-eval installed."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("lm_eval") else ["test_*.py"]
