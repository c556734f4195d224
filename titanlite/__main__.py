"""Run the `titanlite` command as `python -m titanlite`.

The launcher starts each rank this way.
"""

# Importing `signal` instead would take so long that Ctrl-C could interrupt it with a traceback.
import _signal  # pyright: ignore[reportMissingImports]

_signal.signal(_signal.SIGINT, _signal.SIG_DFL)

import sys  # noqa: E402

from titanlite.runtime import process  # noqa: E402


def main() -> None:
    """Run the subcommand in `sys.argv` and exit this process with its exit code."""
    process.set_up_process()  # before the other imports, because a signal can arrive while they run
    from titanlite import cli

    process.leave(cli.main(sys.argv[1:]))


if __name__ == "__main__":
    main()
