"""What the compiled kernel's threads share: memory, and the pool that helps callers from torch."""

import ctypes
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("numba")

from pagedattn._kernels.cpu import compiled, schedule, thread_pool, workers
from pagedattn._kernels.cpu.call_args import CALL_ARGS, COUNTERS, NO_WINDOW, WORK_ITEM, offset

LINE = 128  # bytes: the longest cache line of the CPUs that JAX runs on, Apple's
KV_HEADS, GROUP, HEAD_DIM, BLOCK_SIZE = 2, 2, 64, 16
QUERY_LENS = st.integers(0, 3)
CONTEXT_LENS = st.sampled_from([0, 1, 63, 300, 4000, 20000])
ARRAYS = "query", "tables", "seq_lens", "starts", "out"
BATCHES = st.lists(st.tuples(QUERY_LENS, CONTEXT_LENS), min_size=1, max_size=6)


class Call:
    """A call of the kernel on zeros, of float32, as the frameworks' sides describe it."""

    def __init__(self, batch: list[tuple[int, int]], threads: int):
        query_lens, context_lens = np.array(batch).T
        self.seq_lens = (context_lens + query_lens).astype(np.int32)
        self.starts = np.cumsum([0, *query_lens]).astype(np.int32)
        blocks = -(-int(self.seq_lens.max()) // BLOCK_SIZE) + 1
        self.tables = np.zeros((len(batch), blocks), np.int32)
        self.planes = np.zeros((1, BLOCK_SIZE, KV_HEADS, HEAD_DIM), np.float32)
        num_tokens = max(1, int(self.starts[-1]))
        self.query = np.zeros((num_tokens, KV_HEADS * GROUP, HEAD_DIM), np.float32)
        self.out = np.full_like(self.query, 7)
        self.struct = np.zeros(1, CALL_ARGS)
        head = 4 * HEAD_DIM
        fields = {
            **{name: getattr(self, name).ctypes.data for name in ARRAYS},
            **dict.fromkeys(("key", "value"), self.planes.ctypes.data),
            **dict.fromkeys(("head_dim", "value_dim"), HEAD_DIM),
            **dict.fromkeys(("query_head", "key_head", "value_head"), head),
            **dict.fromkeys(("key_slot", "value_slot"), head * KV_HEADS),
            **dict.fromkeys(("itemsize", "cache_itemsize"), 4),
            **dict.fromkeys(("scale", "unit"), 1),
            "query_token": head * KV_HEADS * GROUP,
            "table_row": 4 * blocks,
            "num_tokens": num_tokens,
            "num_seqs": len(batch),
            "max_blocks": blocks,
            "num_kv_heads": KV_HEADS,
            "group": GROUP,
            "num_blocks": 1,
            "block_size": BLOCK_SIZE,
            "causal": 1,
            "window": NO_WINDOW,
            "longest": 32,
            "threads": threads,
            "most_heads": 1,
        }
        for name, value in fields.items():
            self.struct[name] = value


def struct_at(address: int, kind: np.dtype) -> np.ndarray:
    memory = (ctypes.c_char * kind.itemsize).from_address(address)
    return np.frombuffer(memory, kind)[0]


@given(BATCHES, st.integers(1, 9))
def test_what_threads_write_lies_in_cache_lines_of_its_own(batch, threads):
    """Counters, states and structs begin at a line and overlap no other, whatever the batch is."""
    call = Call(batch, threads)
    address = schedule.begin(call.struct.ctypes.data)
    args = struct_at(address, CALL_ARGS)
    places = [address + at * WORK_ITEM.itemsize for at in range(args["num_items"])]
    first_item = [
        struct_at(int(args["first_item"]) + place - address, WORK_ITEM) for place in places
    ]
    cut = [work_item for work_item in first_item if work_item["parts"] > 1]
    counters = {address + offset(name) for name in COUNTERS}
    counters |= {int(work_item["finished"]) for work_item in cut}
    states = [int(work_item["state"]) for work_item in cut]
    written = [(at, 8) for at in counters] + [(at, int(args["state_bytes"])) for at in states]
    read = [
        (address, offset(COUNTERS[0])),
        (int(args["first_item"]), len(first_item) * WORK_ITEM.itemsize),
    ]
    owner = {}
    for number, (start, size) in enumerate(written + read):
        assert start % LINE == 0
        for line in range(start // LINE, -(-(start + size) // LINE)):
            assert owner.setdefault(line, number) == number
    assert all(
        work_item["state"] == work_item["finished"] == 0
        for work_item in first_item
        if work_item["parts"] == 1
    )
    finish(address, args)
    assert not call.out[: call.starts[-1]].any()


def finish(address: int, args: np.ndarray) -> None:
    """Works as all the threads that the call waits for, one after the other."""
    for _ in range(int(args["threads"])):
        compiled.task("float32", "float32").ctypes(address)
    workers.end(address)


def test_long_sequences_were_cut():
    """The property above saw counters and states."""
    call = Call([(1, 20000), (1, 20000)], 4)
    address = schedule.begin(call.struct.ctypes.data)
    args = struct_at(address, CALL_ARGS)
    assert struct_at(int(args["first_item"]), WORK_ITEM)["parts"] > 1
    finish(address, args)


@pytest.mark.parametrize("kind", [CALL_ARGS, WORK_ITEM], ids=["JOB", "PIECE"])
def test_structs_are_multiples_of_a_line(kind):
    assert kind.itemsize % LINE == 0


def pool_of(most: int) -> int:
    return thread_pool.new_pool(thread_pool.worker().address, most)


def attend(pool: int, call: Call) -> None:
    task = compiled.task("float32", "float32").address
    thread_pool.attention().ctypes(pool, call.struct.ctypes.data, task)


def wait_until_idle(address: int) -> np.ndarray:
    """The pool once all invitations were taken, and its threads sleep."""
    for _ in range(1000):
        pool = struct_at(address, thread_pool.POOL)
        if pool["invitations"] == 0 and pool["idle"] == pool["threads"]:
            return pool
        time.sleep(0.01)
    raise AssertionError(pool)


@pytest.mark.parametrize("most", [0, 1, 3])
def test_a_pool_starts_no_more_threads_than_it_may(most):
    """Where it can start none, the caller does all; nothing is left over."""
    pool = pool_of(most)
    for threads in (1, 2, 9, 4):
        call = Call([(1, 20000), (2, 4000)], threads)
        attend(pool, call)
        assert not call.out[: call.starts[-1]].any()
    assert wait_until_idle(pool)["threads"] == min(most, 8)


def test_calls_at_once_share_a_pool():
    pool, failures = pool_of(3), []

    def repeat(seed):
        for turn in range(20):
            call = Call([(1, 4000 + 100 * turn), (1, 300 * seed)], 1 + (seed + turn) % 5)
            attend(pool, call)
            failures.extend([seed] * int(call.out[: call.starts[-1]].any()))

    callers = [threading.Thread(target=repeat, args=(seed,)) for seed in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not failures
    assert wait_until_idle(pool)["first"] == 0
