"""A call of the kernel for callers who bring no threads: those of a pool, outside Python's GIL.

POSIX threads, started when first invited; between invitations they sleep. A process that was forked
has none of its parent's threads, and makes a pool of its own.
"""

import os

import numpy as np
from numba import from_dtype, types

from . import schedule, workers
from .call_args import APART, args_at, record_at, struct
from .compiled import NUMBER, machine_code, sources
from .compiling import fast, once
from .memory import aligned_alloc, call_at, free, get_int64, malloc, memset, put_int64, system

POOL = struct(
    [
        ("first", "i8"),  # the address of the invitation to be taken next; 0 if there is none
        ("invitations", "i8"),
        ("idle", "i8"),  # threads that sleep, or have just been woken
        ("threads", "i8"),
        ("most", "i8"),  # threads that may be started
        ("worker", "i8"),  # the address of the function that they run
    ]
)
# Behind the struct; no system's are larger.
MUTEX, CONDITION = POOL.itemsize, POOL.itemsize + APART
POOL_BYTES = CONDITION + APART
TASK, CALL_ARGS = 1, 2  # the words of an invitation, after the address of the next one
INVITATION_BYTES = 24

pool_at = record_at(from_dtype(POOL))


def _posix(name, *arguments):
    return system(f"pthread_{name}", types.int32(*arguments))


_address, _two = (types.intp,), (types.intp, types.intp)
init_mutex, init_condition = _posix("mutex_init", *_two), _posix("cond_init", *_two)
lock, unlock = _posix("mutex_lock", *_address), _posix("mutex_unlock", *_address)
sleep, wake = _posix("cond_wait", *_two), _posix("cond_signal", *_address)
wake_all = _posix("cond_broadcast", *_address)
start, detach = _posix("create", *_two, *_two), _posix("detach", *_address)


@fast
def new_pool(worker, most):
    """The address of a pool that may start so many threads."""
    address = aligned_alloc(APART, POOL_BYTES)
    memset(address, 0, POOL_BYTES)
    pool = pool_at(address)
    pool.worker, pool.most = worker, most
    init_mutex(address + MUTEX, 0)
    init_condition(address + CONDITION, 0)
    return address


@fast
def take(pool):
    """The next invitation, or 0; the caller holds the lock."""
    invitation = pool.first
    if invitation != 0:
        pool.first, pool.invitations = get_int64(invitation, 0), pool.invitations - 1
    return invitation


@fast
def follow(invitation):
    call_at(get_int64(invitation, TASK), get_int64(invitation, CALL_ARGS))
    free(invitation)


@fast
def follow_all(address):
    invitation = np.int64(1)
    while invitation != 0:
        lock(address + MUTEX)
        invitation = take(pool_at(address))
        unlock(address + MUTEX)
        if invitation != 0:
            follow(invitation)


@fast
def serve(address):
    """What a thread of the pool does, as long as the process lives."""
    pool = pool_at(address)
    while pool.worker != 0:  # always: Numba wants an end
        lock(address + MUTEX)
        invitation = take(pool)
        while invitation == 0:
            pool.idle += 1
            sleep(address + CONDITION, address + MUTEX)
            pool.idle -= 1
            invitation = take(pool)
        unlock(address + MUTEX)
        follow(invitation)


@fast
def add_threads(address):
    """Starts threads for invitations that no idle one will take; the caller holds the lock."""
    pool, room = pool_at(address), malloc(8)
    missing = min(pool.invitations - pool.idle, pool.most - pool.threads)
    for _ in range(missing):
        if start(room, 0, pool.worker, address) == 0:
            detach(get_int64(room, 0))
            pool.threads += 1
    free(room)


@fast
def invite(address, task, args, count):
    """Has `count` threads run `task(call)` when they can, or this one where none can be started."""
    pool = pool_at(address)
    lock(address + MUTEX)
    for _ in range(count):
        invitation = malloc(INVITATION_BYTES)
        put_int64(invitation, 0, pool.first)
        put_int64(invitation, TASK, task)
        put_int64(invitation, CALL_ARGS, args)
        pool.first, pool.invitations = invitation, pool.invitations + 1
    add_threads(address)
    alone, most = pool.threads == 0, 2 * count > pool.idle
    unlock(address + MUTEX)
    if alone:
        follow_all(address)
    elif most:  # one call of the system in place of as many
        wake_all(address + CONDITION)
    else:
        for _ in range(count):
            wake(address + CONDITION)


@fast
def attend(pool, call, task):
    """A whole call: threads of the pool work on it, and this one, which waits for them."""
    address = schedule.begin(call)
    helpers = args_at(address).threads - 1
    if helpers > 0:
        invite(pool, task, address, helpers)
    call_at(task, address)
    workers.end(address)


@once
def attention():
    """`void attention(pool, call, task)`: see `attend`."""
    version = sources()

    def attention(pool, call, task):
        if pool != version:
            attend(pool, call, task)

    return machine_code(types.void(NUMBER, NUMBER, NUMBER), attention, "attention")


@once
def worker():
    """`worker(pool)`: what a thread runs."""
    version = sources()

    def worker(pool):
        if pool != version:
            serve(pool)
        return 0

    return machine_code(NUMBER(NUMBER), worker, "worker")


@once
def pool() -> int:
    """The address of this process's pool."""
    return new_pool(worker().address, np.int64(os.cpu_count() or 1))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=pool.cache_clear)
