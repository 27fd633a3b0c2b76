"""lm-eval's command line, which knows `--model pace` here."""

from lm_eval.__main__ import cli_evaluate

import pace.integrations.lm_eval  # noqa: F401

if __name__ == "__main__":
    cli_evaluate()
