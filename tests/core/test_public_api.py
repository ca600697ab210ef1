"""The names of the public contract, their arguments, and that each is documented."""

import importlib
import inspect

import pytest

import pagedattn
from pagedattn import (
    BackendUnavailableError,
    InvalidInputError,
    OutOfBlocksError,
    PagedAttentionError,
    UnsupportedError,
)

# name -> positional arguments, keyword-only arguments; None: not checked
FUNCTIONS = {
    "pagedattn": {
        "AttentionSpec": (
            "",
            "scale causal sliding_window logits_soft_cap alibi_slopes",
        ),
        "alibi_slopes": ("num_heads", ""),
        "KVCache": ("key value key_scale value_scale value_dim", ""),
        "init_kv_cache": (
            "num_blocks block_size num_kv_heads head_dim dtype",
            "scales key_scale value_scale value_dim",
        ),
        "init_latent_cache": (
            "num_blocks block_size head_dim value_dim dtype",
            "num_kv_heads scales key_scale",
        ),
        "BatchMetadata": None,
        "make_batch": (
            "query_lens context_lens block_tables",
            "block_size key_lens parents pad_tokens pad_seqs pad_blocks max_query_len",
        ),
        "check_batch": ("batch cache spec", ""),
        "slot_mapping": ("block_tables seq_ids positions", "block_size"),
        "positions": ("query_start_loc seq_lens num_tokens", ""),
        "write_kv": ("cache key value slot_mapping", ""),
        "copy_blocks": ("cache src dst", ""),
        "swap_blocks": ("src_cache dst_cache src dst", ""),
        "paged_attention": (
            "query cache batch spec",
            "backend return_lse batch_invariant sinks bias selection",
        ),
        "ragged_attention": (
            "query key value query_start_loc key_start_loc spec",
            "max_query_len max_key_len backend return_lse batch_invariant sinks bias selection "
            "parents",
        ),
        "summarise_blocks": ("cache batch", "kind dtype"),
        "update_summaries": ("summaries cache batch", ""),
        "score_blocks": ("query summaries batch", ""),
        "select_blocks": ("scores batch num_blocks", "first last"),
        "Selection": ("blocks ascending", ""),
        "BlockSummaries": ("planes", ""),
        "cascade_attention": ("query cache prefix rest spec", "backend sinks"),
        "split_prefix": ("batch", ""),
        "accept_tokens": ("pool caches path batch", ""),
        "append_tokens": ("pool num_tokens", "max_new_tokens"),
        "next_batch": ("pool query_lens", "num_tokens max_query_len parents"),
        "next_batches": ("pools query_lens", "num_tokens max_query_len parents"),
        "batch_from_pool": ("pool query_lens", "num_tokens max_query_len parents"),
        "merge_states": ("out_a lse_a out_b lse_b", ""),
        "merge_across": ("out lse axis_name", ""),
        "attention_bias": ("query_positions key_positions spec", ""),
        "causal_mask": None,
        "sliding_window_mask": None,
        "alibi_bias": None,
        "explain": None,
        "available_backends": ("", ""),
        "PagedAttentionError": None,
        "InvalidInputError": None,
        "UnsupportedError": None,
        "BackendUnavailableError": None,
        "OutOfBlocksError": None,
    },
    "pagedattn.testing": {
        "reference_attention": None,
        "reference_write": None,
        "assert_attention_close": None,
        "check_backend": None,
        "Problem": None,
        "random_problem": None,
        "expect": None,
    },
    "pagedattn_torch": {
        "paged_attention": ("query cache batch spec", None),
        "ragged_attention": None,
        "write_kv_": ("cache key value slot_mapping", ""),
        "copy_blocks_": ("cache src dst", ""),
        "swap_blocks_": ("src_cache dst_cache src dst", ""),
    },
    "pagedattn_interop": {
        "to_torch": None,
        "to_jax": None,
        "torch_call": ("fn out", "aliases capturable takes_out"),
    },
}
NAMES = [(module, name) for module, names in FUNCTIONS.items() for name in names]
ARRAYS = (
    "block_tables seq_lens query_start_loc slot_mapping positions block_size max_query_len tree"
)


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_exists_and_is_documented(module, name):
    thing = getattr(importlib.import_module(module), name)
    assert inspect.getdoc(thing)
    assert "Field" not in (thing.__doc__ or "")[:5]


@pytest.mark.parametrize(("module", "name"), [m for m in NAMES if FUNCTIONS[m[0]][m[1]]])
def test_arguments(module, name):
    positional, keyword = FUNCTIONS[module][name]
    parameters = inspect.signature(
        getattr(importlib.import_module(module), name)
    ).parameters.values()
    by_kind = {
        kind: [p.name for p in parameters if p.kind == kind]
        for kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    }
    assert by_kind[inspect.Parameter.POSITIONAL_OR_KEYWORD] == positional.split()
    if keyword is not None:
        assert by_kind[inspect.Parameter.KEYWORD_ONLY] == keyword.split()


def test_batch_fields():
    assert list(inspect.signature(pagedattn.BatchMetadata).parameters) == ARRAYS.split()


ERRORS = [
    (InvalidInputError, ValueError),
    (UnsupportedError, NotImplementedError),
    (BackendUnavailableError, ImportError),
    (OutOfBlocksError, MemoryError),
]


@pytest.mark.parametrize(("error", "builtin"), ERRORS)
def test_errors_are_also_builtins(error, builtin):
    assert issubclass(error, builtin)
    assert issubclass(error, PagedAttentionError)
    assert issubclass(PagedAttentionError, Exception)


def test_public_functions_carry_an_example():
    names = [n for n in FUNCTIONS["pagedattn"] if inspect.isfunction(getattr(pagedattn, n))]
    undocumented = [n for n in names if ">>>" not in (getattr(pagedattn, n).__doc__ or "")]
    assert not undocumented


def test_versions_of_the_layers_load_together():
    for module in FUNCTIONS:
        importlib.import_module(module)
    assert set(pagedattn.available_backends()) >= {"xla", "sdpa"}
