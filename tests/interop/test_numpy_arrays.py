"""NumPy arrays of every kind, wherever the torch layer takes arrays of any framework."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from cases import mixed

from pagedattn import InvalidInputError, KVCache
from pagedattn.testing import batch_of

torch = pytest.importorskip("torch")
import pagedattn_torch
from pagedattn_torch.arrays import tensor


def unaligned(x):
    room = np.empty(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    room[:] = x
    return room


def field_of_a_record(x):
    record = np.zeros(x.shape, [("pad", np.int8), ("x", x.dtype)])
    record["x"] = x
    return record["x"]


def read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


class Plain:
    """An array of nobody's, with the protocol alone."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **kwargs):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


# The same numbers in other forms: all are taken.
FORMS = {
    "plain": np.copy,
    "reversed": lambda x: np.flip(np.flip(x).copy()),
    "reversed rows": lambda x: np.copy(x[::-1])[::-1],
    "every second": lambda x: np.repeat(x, 2, 0)[::2],
    "Fortran's order": np.asfortranarray,
    "read-only": read_only,
    "the other byte order": lambda x: x.astype(x.dtype.newbyteorder()),
    "unaligned": unaligned,
    "a field of a record": field_of_a_record,
    "of 64 bits": lambda x: x.astype(np.int64),
    "of 16 bits": lambda x: x.astype(np.int16),
    "of another owner, reversed": lambda x: Plain(np.copy(x[::-1])[::-1]),
    "of JAX": jnp.asarray,
}


def as_it_is(x):
    return x


def refused(x):
    """Arrays of what is no integer, or may lack one."""
    return {
        "objects": x.astype(object),
        "text": x.astype(str),
        "records": np.zeros(x.shape, [("a", np.int32)]),
        "masked": np.ma.masked_array(x),
        "dates": x.astype("datetime64[s]"),
        "long double": x.astype(np.longdouble),
    }


REFUSED = tuple(refused(np.zeros(1, np.int32)))


def cache():
    return KVCache(torch.arange(8.0).reshape(4, 2, 1, 1), torch.zeros(4, 2, 1, 1))


def write(form):
    key = torch.full((2, 1, 1), 9.0)
    return pagedattn_torch.write_kv_(cache(), key, key, form(np.array([3, 5], np.int32))).key


def copy(form):
    src, dst = np.array([0, 1], np.int32), np.array([1, 3], np.int32)
    return pagedattn_torch.copy_blocks_(cache(), form(src), form(dst)).key


def attend(form):
    problem = mixed(poison=None)
    arrays = {
        name: form(np.asarray(getattr(batch_of(problem), name)))
        for name in ("block_tables", "seq_lens", "query_start_loc", "slot_mapping", "positions")
    }
    query, key, value = (
        torch.from_numpy(np.array(x))
        for x in (problem.query, problem.key_cache, problem.value_cache)
    )
    batch = dataclasses.replace(batch_of(problem), **arrays)
    return pagedattn_torch.paged_attention(query, KVCache(key, value), batch)


def ragged(form):
    x, starts = torch.arange(24.0).reshape(3, 1, 8), np.array([0, 1, 3], np.int32)
    return pagedattn_torch.ragged_attention(
        x, x, x, form(starts), form(starts), max_query_len=2, max_key_len=2
    )


ENTRIES = {f.__name__: f for f in (write, copy, attend, ragged)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("entry", ENTRIES)
def test_every_form_means_its_numbers(entry, form):
    torch.testing.assert_close(ENTRIES[entry](FORMS[form]), ENTRIES[entry](torch.tensor))


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("entry", ENTRIES)
def test_what_holds_no_integers_is_refused(entry, kind):
    with pytest.raises(InvalidInputError):
        ENTRIES[entry](lambda x: refused(x)[kind])


@pytest.mark.parametrize("kind", REFUSED)
def test_the_argument_is_named(kind):
    with pytest.raises(InvalidInputError, match="tables"):
        tensor("tables", refused(np.zeros((2, 3), np.int32))[kind])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0), (1, 1)])
def test_empty_and_single(shape, form):
    array = np.zeros(shape, np.int32)
    assert tuple(tensor("x", FORMS[form](array)).shape) == shape


def test_repeated_memory_is_no_hindrance():
    assert tensor("x", np.broadcast_to(np.int32(3), (2, 3))).tolist() == [[3] * 3] * 2
    windows = np.lib.stride_tricks.sliding_window_view(np.arange(4, dtype=np.int32), 2)
    assert tensor("x", windows).tolist() == [[0, 1], [1, 2], [2, 3]]


def test_plain_memory_is_shared():
    array = np.zeros(8, np.int32)
    assert tensor("x", array).data_ptr() == array.ctypes.data
