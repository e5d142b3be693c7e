#!/usr/bin/env python3
"""Laststep: PyTorch training on Slurm, launched from Python, that always resumes at its last step."""

import sys

from trainer.commands.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
