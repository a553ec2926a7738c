"""Run a command, `python -m lightning_pipe plan ...`, or a program, `python -m lightning_pipe run train.py ...`."""

import sys

from lightning_pipe.entry import run_program

if sys.argv[1:2] == [run_program.COMMAND]:  # without the parts that plan
    sys.exit(run_program.main())

from lightning_pipe.cli import main

sys.exit(main())
