"""lm-eval's command line with the model type "pace"."""

from lm_eval.__main__ import cli_evaluate

import pace.integrations.lm_eval  # noqa: F401

if __name__ == "__main__":
    cli_evaluate()
