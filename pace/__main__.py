"""`python -m pace` is the command `pace`."""

import sys

from pace.cli import main

sys.exit(main())
