"""What the commands that serve a checkpoint have in common on their command lines."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from serving.checkpoint import SHIPPED
from serving.decoder import Decoder
from serving.limits import Limits


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser of the model and the sizes of a pool, for a command to add its own to."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model", type=Path, nargs="?", default=SHIPPED, help="a checkpoint's folder"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--num-blocks", type=int, default=256, help="size of a pool")
    parser.add_argument("--block-size", type=int, default=16, help="tokens a block")
    parser.add_argument("--max-seq-len", type=int, help="tokens; default: the model's, up to 4096")
    parser.add_argument("--max-seqs", type=int, default=8, help="sequences in a pool at a time")
    return parser


def number_from(least: int, most: float = math.inf) -> Callable[[str], int]:
    """Reads an argument that is a number from `least` to `most`."""

    expected = f"{least} or more" if most == math.inf else f"a number from {least} to {most}"

    def integer(text: str) -> int:
        if not least <= (number := int(text)) <= most:
            raise argparse.ArgumentTypeError(f"expected {expected}, got {number}")
        return number

    return integer


port_number = number_from(0, 65535)


def seconds(text: str) -> float:
    """Reads an argument that is a finite number of seconds, 0 or more."""
    if not 0 <= (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"expected seconds from 0 up, got {text}")
    return number


def limits_of(args: argparse.Namespace, model: Decoder) -> Limits:
    """Raises ValueError for sizes that do not fit each other."""
    longest = args.max_seq_len
    if longest is None:
        longest = min(model.max_position_embeddings, 4096)
    step = {"token_budget": max(64, 2 * args.max_seqs), "max_query_len": 64}
    return Limits(args.num_blocks, args.block_size, longest, args.max_seqs, **step)
