"""`python -m titanlite`: the same as the command `titanlite`, and how the launcher starts a rank."""

import sys

from titanlite.runtime import process


def main() -> None:
    """Run one subcommand and end this process with its exit code."""
    process.begin()  # before the imports: they take long enough for a signal to arrive
    from titanlite import cli

    process.leave(cli.main(sys.argv[1:]))


if __name__ == "__main__":
    main()
