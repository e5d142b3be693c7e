#!/usr/bin/env python3
"""Laststep: PyTorch training on Slurm, launched from Python, that always resumes at its last step."""

import sys

if __name__ == "__main__":
    try:
        from trainer.commands.main import main

        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # while Python still imports what would catch it
        sys.exit(130)
