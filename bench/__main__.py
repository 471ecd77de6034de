"""Entry point of ``python -m bench``; the commands are listed in :mod:`bench.cli`."""

import sys

from bench.cli import exit_on_signals, main

if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main(sys.argv[1:]))
