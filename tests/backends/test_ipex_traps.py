"""Why the ipex backend guards its calls: sizes, layouts and dtypes that the operators get wrong.

Each test holds for release 2.8; one that turns red says that its guard can go.
"""

import inspect

import pytest

torch = pytest.importorskip("torch")

from ipex_raw import (
    CLOSE,
    PagedAttention,
    case_of,
    decode,
    error,
    every_operator,
    expected,
    isolated,
    varlen,
)


def slots_first(pages):
    """The same pages, stored slots before heads."""
    return pages.transpose(1, 2).contiguous().transpose(1, 2)


def shared_prefix():
    """Four sequences with one first block, and too many heads for the flash decoding kernel."""
    case = case_of([40, 33, 40, 20], heads=4 * torch.get_num_threads(), kv_heads=1)
    case.tables[:, 0] = case.tables[0, 0]
    return case


def decode_error(block_size):
    case = case_of([300, 7, 129], block_size=block_size)
    return error(decode(case), expected(case))


def empty_decode():
    return decode(case_of([16]), max_context_len=0, context_lens=torch.zeros(1, dtype=torch.int32))


def varlen_with_zero(name):
    return varlen(case_of([16], [2]), **{name: 0})


def test_slot_minus_one_is_written_before_the_cache_and_into_other_heads():
    memory = torch.zeros(2, 3, 2, 4, 16)  # key and value; a block before the cache and one after
    cache = memory[:, 1:2]
    new = torch.arange(1.0, 33.0).view(1, 2, 16)
    slot = torch.tensor([-1], dtype=torch.int32)
    PagedAttention.reshape_and_cache(new, new, cache[0], cache[1], slot)
    for pages in memory:
        assert pages[0, -1, -1].equal(new[0, 0])  # the block that is not of this cache
        assert pages[1, 0, -1].equal(new[0, 1])  # head 1's token, in head 0's last slot
    assert memory.count_nonzero() == 64


@pytest.mark.parametrize("block_size", [24, 48, 96, 192, 256, 512])
def test_decode_breaks_where_blocks_do_not_divide_128(block_size):
    found = isolated(decode_error, block_size)
    assert found is None or not found < 1e-2  # it died, or is wrong


@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 16, 32, 64, 128])
def test_decode_is_right_where_blocks_divide_128(block_size):
    assert isolated(decode_error, block_size) < CLOSE


@pytest.mark.parametrize("block_size", [24, 256])
def test_varlen_is_right_whatever_the_block_size(block_size):
    case = case_of([300, 129], [3, 129], block_size=block_size)
    assert error(varlen(case), expected(case)) < CLOSE


def test_decode_of_an_empty_sequence_is_nan():
    out = decode(case_of([16, 0]))
    assert out[0].isfinite().all()
    assert out[1].isnan().all()


def test_decode_dies_where_every_sequence_is_empty():
    assert isolated(empty_decode) is None


def test_varlen_is_wrong_on_pages_with_slots_before_heads():
    case = case_of([40], [4])
    case = case.swap(key=slots_first(case.key), value=slots_first(case.value))
    assert error(varlen(case), expected(case)) > 0.1


def test_decode_is_right_on_pages_with_slots_before_heads():
    case = case_of([40])
    case = case.swap(key=slots_first(case.key), value=slots_first(case.value))
    assert error(decode(case), expected(case)) < CLOSE


def test_decode_reads_values_with_the_strides_of_keys():
    case = case_of([40])
    case = case.swap(value=slots_first(case.value))
    assert error(decode(case), expected(case)) > 0.1


def test_writes_put_values_with_the_strides_of_keys():
    keys = torch.zeros(1, 2, 4, 16)
    values, new = slots_first(keys), torch.ones(1, 2, 16)
    slot = torch.tensor([2], dtype=torch.int32)
    PagedAttention.reshape_and_cache(new, new, keys, values, slot)
    assert keys[0, :, 2].equal(new[0])
    assert not values[0, :, 2].equal(new[0])


def test_decode_raises_where_four_sequences_share_their_first_block():
    with pytest.raises(RuntimeError, match="Sliding window unsupported"):
        decode(shared_prefix())


def test_a_window_of_the_whole_context_avoids_that():
    case = shared_prefix()
    out = decode(case, window_size=max(case.seq_lens))
    assert error(out, expected(case)) < CLOSE


def test_an_empty_sequence_with_another_first_block_avoids_that():
    case = shared_prefix()
    other = torch.full((1, case.tables.shape[1]), int(case.tables[0, 1]), dtype=torch.int32)
    query = torch.cat([torch.zeros_like(case.query[:1]), case.query])
    longer = case.swap(
        query=query, tables=torch.cat([other, case.tables]), seq_lens=[0, *case.seq_lens]
    )
    assert error(decode(longer)[1:], expected(case)) < CLOSE


INT64 = {
    "decode tables": (decode, "block_tables", torch.zeros(1, 1, dtype=torch.int64)),
    "decode lengths": (decode, "context_lens", torch.tensor([16])),
    "varlen tables": (varlen, "block_tables", torch.zeros(1, 1, dtype=torch.int64)),
    "varlen query starts": (varlen, "cu_seqlens_q", torch.tensor([0, 1])),
    "varlen key starts": (varlen, "cu_seqlens_kv", torch.tensor([0, 16])),
}


@pytest.mark.parametrize(("operator", "name", "tensor"), INT64.values(), ids=INT64)
def test_int64_raises(operator, name, tensor):
    with pytest.raises(RuntimeError, match="expected scalar type Int"):
        operator(case_of([16]), **{name: tensor})


@every_operator
def test_float64_raises(operator):
    with pytest.raises(RuntimeError):
        operator(case_of([16], dtype=torch.float64))


def test_varlen_rows_that_see_nothing_are_nan():
    out = varlen(case_of([1, 0, 16], [3, 2, 1]))
    assert out[[0, 1, 3, 4]].isnan().all()
    assert out[[2, 5]].isfinite().all()


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_kv"])
def test_varlen_dies_where_a_greatest_length_is_zero(name):
    assert isolated(varlen_with_zero, name) is None


def test_no_operator_gives_an_lse():
    for name in ("single_query_cached_kv_attention", "flash_attn_varlen_func"):
        assert not any(
            "lse" in p for p in inspect.signature(getattr(PagedAttention, name)).parameters
        )
        assert len(getattr(torch.ops.torch_ipex, name).default._schema.returns) == 1


def test_the_head_mapping_is_ignored():
    case = case_of([40])
    swapped = torch.tensor([1, 1, 0, 0], dtype=torch.int32)
    assert decode(case, head_mapping=swapped).equal(decode(case))
