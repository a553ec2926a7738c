"""Run the command line: `python -m lightning_pipe plan ...`."""

import sys

from lightning_pipe.cli import main

sys.exit(main())
