"""`python -m titanlite`: the same as the command `titanlite`. The launcher starts each rank this way."""

import sys

from titanlite.runtime import process


def main() -> None:
    """Run one subcommand and end this process with its exit code."""
    process.begin()  # before the imports, because a signal can arrive while they run
    from titanlite import cli

    process.leave(cli.main(sys.argv[1:]))


if __name__ == "__main__":
    main()
