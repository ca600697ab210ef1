"""What a peer of the scoreboard is, and what several of them share."""

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from pagedattn.extend import cdiv
from pagedattn.testing import Problem

Answer = tuple[Any, Any]  # out, and lse or None, as anything that NumPy reads


class Peer(NamedTuple):
    """A kernel of someone else.

    Fields:
      attend: `attend(problem)` gives out and lse, which may be None. It may raise anything.
      takes: the options that it has an argument for, and "float16", "float32", "lse",
        "causal=False", as `cells.needs` names them.
      modules: those that it needs.
      install: how to get them.
      packages: the distributions whose versions are told.
      device: "cpu" or "cuda".
      about: what is asked, and what documentation says so.
      lacks: `lacks(cell)` says why a cell is not offered although all its options are.
    """

    attend: Callable[[Problem], Answer]
    takes: frozenset[str]
    modules: tuple[str, ...]
    install: str
    packages: tuple[str, ...]
    device: str
    about: str
    lacks: Callable[[Any], str | None] = lambda cell: None


def missing(peer: Peer) -> str | None:
    """Why a peer cannot be asked here."""
    absent = [name for name in peer.modules if not _found(name)]
    if absent:
        return f"{', '.join(absent)} is not installed: {peer.install}"
    if peer.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            return "it needs a GPU"
    return None


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package of a submodule
        return False


def tensor(array, device: str = "cpu"):
    """A torch tensor of a NumPy array, of dtypes that torch does not read from NumPy too."""
    import torch

    flat = torch.from_numpy(np.array(array).reshape(-1).view(np.uint8))
    return flat.view(getattr(torch, str(array.dtype))).reshape(array.shape).to(device)


def tables(problem: Problem) -> np.ndarray:
    """int32 `[num_seqs, max_blocks]`, 0 where a row has no more blocks."""
    width = max(len(row) for row in problem.block_tables)
    padded = np.zeros((len(problem.block_tables), width), np.int32)
    for row, given in zip(padded, problem.block_tables, strict=True):
        row[: len(given)] = given
    return padded


def starts(problem: Problem) -> np.ndarray:
    return problem.query_start_loc.astype(np.int32)


def lens(problem: Problem) -> np.ndarray:
    return np.asarray(problem.seq_lens, np.int32)


def planes(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values; ValueError for a latent cache, which few peers take."""
    if problem.value_cache is None:
        raise ValueError("a latent cache has one plane")
    return problem.key_cache, problem.value_cache


def scale_of(problem: Problem) -> float:
    return problem.spec.scale_for(problem.query.shape[2])


class Sequence(NamedTuple):
    """The rows of one sequence, its keys gathered from the pages."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    bias: np.ndarray | None
    visible: np.ndarray  # bool [query_len, seq_len]: by causality and window


def sequences(problem: Problem) -> list[Sequence]:
    """For peers without pages: what a user of theirs would gather."""
    found = []
    for s, seq_len in enumerate(problem.seq_lens):
        rows = slice(*problem.query_start_loc[s : s + 2])
        ids = np.asarray(problem.block_tables[s][: cdiv(seq_len, problem.block_size)], int)
        key = problem.key_cache[ids].reshape(-1, *problem.key_cache.shape[2:])[:seq_len]
        if problem.value_cache is None:
            value = key[..., : problem.value_dim]
        else:
            value = problem.value_cache[ids].reshape(-1, *problem.value_cache.shape[2:])[:seq_len]
        bias = None if problem.bias is None else problem.bias[rows, :, :seq_len]
        visible = _visible(rows.stop - rows.start, seq_len, problem.spec)
        found.append(Sequence(problem.query[rows], key, value, bias, visible))
    return found


def _visible(query_len: int, seq_len: int, spec) -> np.ndarray:
    behind = seq_len - query_len + np.arange(query_len)[:, None] - np.arange(seq_len)
    visible = behind >= 0 if spec.causal else np.ones_like(behind, bool)
    window = spec.sliding_window
    return visible if window is None else visible & (np.abs(behind) < window)
