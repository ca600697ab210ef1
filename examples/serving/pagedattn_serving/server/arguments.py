"""What the commands that serve a checkpoint have in common on their command lines."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from starlette.middleware import Middleware

from pagedattn_serving.blocks.cache_dtypes import CACHE_DTYPES
from pagedattn_serving.blocks.limits import Limits
from pagedattn_serving.blocks.pool_size import longest
from pagedattn_serving.checkpoint.folder import SHIPPED
from pagedattn_serving.families.decoder import Decoder
from pagedattn_serving.server.guards import guards


def make_parser(command: str, description: str | None) -> argparse.ArgumentParser:
    """A parser of the model, its address and the sizes of a pool, for a command to add to."""
    parser = argparse.ArgumentParser(
        command, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model",
        metavar="DIR",
        type=Path,
        nargs="?" if SHIPPED.is_dir() else None,  # an sdist of the repository is without it
        default=SHIPPED,
        help=f"a checkpoint's folder; default: {SHIPPED.name}, where it is installed",
    )
    parser.add_argument("--name", help="what clients call the model; default: the folder's name")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--api-key", type=secret, help="that clients must send; default: none")
    parser.add_argument(
        "--allowed-origin",
        type=origin,
        action="append",
        default=[],
        help="from which web pages may ask; * for any; may be given several times",
    )
    parser.add_argument("--backend", help="default: the first that fits each call")
    parser.add_argument(
        "--batch-invariant",
        action="store_true",
        help="log-probabilities of a request have the same bits in any company; slower",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--kv-cache-dtype",
        choices=CACHE_DTYPES,
        default="auto",
        help="of keys and values, fewer bits with a scale for each token; default: the model's",
    )
    parser.add_argument("--num-blocks", type=int, default=256, help="size of a pool")
    parser.add_argument("--block-size", type=int, default=16, help="tokens a block")
    lengths = parser.add_mutually_exclusive_group()
    lengths.add_argument(
        "--max-seq-len", type=int, help="tokens in the cache; default: the model's, up to 4096"
    )
    lengths.add_argument(
        "--max-model-len", type=number_from(2), help="tokens of a prompt and its answer together"
    )
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


def secret(text: str) -> str:
    """Reads a key that can be sent in a header."""
    if not text or not text.isascii() or not text.isprintable() or text != text.strip():
        raise argparse.ArgumentTypeError("expected printable ASCII characters")
    return text


def origin(text: str) -> str:
    """Reads an origin as browsers send it, or * for any."""
    parts = urlsplit(text)
    if text != "*" and (not parts.netloc or text != f"{parts.scheme}://{parts.netloc}".lower()):
        raise argparse.ArgumentTypeError(f"expected * or SCHEME://HOST[:PORT], got {text}")
    return text


def middleware_of(args: argparse.Namespace) -> list[Middleware]:
    """Who may ask, as --api-key and --allowed-origin say."""
    return guards(args.api_key, tuple(args.allowed_origin))


def limits_of(args: argparse.Namespace, model: Decoder) -> Limits:
    """Raises ValueError for sizes that do not fit each other."""
    max_seq_len, most = args.max_seq_len, args.max_model_len
    if most is not None:
        max_seq_len = most - 1  # the last token of an answer is never cached
    if max_seq_len is None:
        max_seq_len = min(model.max_position_embeddings, 4096)
    step = {"token_budget": max(64, 2 * args.max_seqs), "max_query_len": 64}
    limits = Limits(args.num_blocks, args.block_size, max_seq_len, args.max_seqs, **step)
    if most is not None and (fit := longest(limits, model.windows, 1) + 1) < most:
        raise ValueError(
            f"--max-model-len {most}: {fit} tokens fit into the pool; more --num-blocks hold more"
        )
    return limits
