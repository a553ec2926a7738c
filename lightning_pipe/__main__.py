"""Run the command line: `python -m lightning_pipe plan ...`."""

import sys

from lightning_pipe.entry.run_program import COMMAND

if sys.argv[1:2] == [COMMAND]:  # without the parts that plan
    from lightning_pipe.entry.run_program import main
else:
    from lightning_pipe.cli import main

sys.exit(main())
