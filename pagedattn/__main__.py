"""`python -m pagedattn`: what this machine has, which backends are usable here, what they can do.

Exit status: 0; 1 where JAX finds no device, or a backend computes something else, in the self-check
or in the call that is replayed; 2 for a wrong argument.
"""

import argparse
import json
import os
import sys

from . import __version__
from .errors import PagedAttentionError
from .report import replay, text, tune
from .report.gather import failures, gather
from .report.text import plain


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pagedattn",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    check = "hold every usable backend to the oracle; the first time takes a minute"
    parser.add_argument("--check", action="store_true", help=check)
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--version", action="version", version=__version__)
    again = "run a call that pagedattn.testing.record kept by every backend, against the oracle"
    parser.add_argument("--replay", metavar="FILE", help=again)
    measure = "measure at which sizes which backend is faster here, in at most two minutes"
    parser.add_argument("--tune", action="store_true", help=measure)
    return parser.parse_args()


def main() -> int:
    asked = arguments()
    try:
        found, shown, failed = answered(asked)
    except PagedAttentionError as error:
        print(error, file=sys.stderr)
        return 2
    show(json.dumps(found, indent=1) if asked.json else screen(shown))
    return 1 if failed else 0


def answered(asked: argparse.Namespace) -> tuple[dict, list, bool]:
    """What is found, how it is shown, and whether something failed."""
    if asked.replay:
        found = replay.replay(asked.replay)
        return found, text.replayed(found), replay.wrong(found)
    if asked.tune:
        found = tune.tune()
        return found, text.tuned(found), False
    found = gather(check=asked.check)
    return found, text.parts(found), bool(failures(found))


def screen(shown: list) -> str:
    """The report by rich where it is installed, and plainly where it is not."""
    try:
        from .report.colour import coloured
    except ImportError:
        return plain(shown)
    return coloured(shown)


def show(text: str) -> None:
    """Prints; a reader that closes the pipe early, as `head` does, is no error."""
    try:
        print(text.rstrip(), flush=True)
    except BrokenPipeError:
        # At exit Python would flush standard output again, and fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
