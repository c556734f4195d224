"""`python -m titanlite`: the same as the command `titanlite`. The launcher starts each rank this way."""

import os
import signal

signal.signal(signal.SIGINT, lambda number, _: os._exit(128 + number))  # so that Ctrl-C never gives a traceback

import sys  # noqa: E402

from titanlite.runtime import process  # noqa: E402


def main() -> None:
    """Run one subcommand and end this process with its exit code."""
    process.begin()  # before the imports, because a signal can arrive while they run
    from titanlite import cli

    process.leave(cli.main(sys.argv[1:]))


if __name__ == "__main__":
    main()
