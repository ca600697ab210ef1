"""Small mistakes in the library, and the tests that have to notice each."""

from pathlib import Path
from typing import NamedTuple

LIBRARY = ("pagedattn", "pagedattn_torch", "interop")


class Mutant(NamedTuple):
    """A piece of text that stands once in the library, what replaces it, and who notices."""

    text: str
    mistake: str
    tests: str  # arguments of pytest


def files_with(text: str, root: Path) -> list[Path]:
    """The library's files with a text, each as often as it stands there."""
    files = [path for part in LIBRARY for path in sorted((root / part).rglob("*.py"))]
    return [path for path in files for _ in range(path.read_text().count(text))]


FEATURES = (
    "tests/backends/test_properties.py -k test_every_feature_matches_or_is_refused and xla and jit"
)
INVARIANT = "tests/backends/test_batch_invariant.py -k same_bits and xla"
POISON = "tests/backends/test_properties.py -k test_poison_behind_every_window and {} and eager"
SINKS = "tests/backends/test_sinks.py -k rows_without_keys and xla and jit"

MUTANTS = {
    "window one too wide": Mutant(
        "(abs(apart) < spec.sliding_window)", "(abs(apart) <= spec.sliding_window)", FEATURES
    ),
    "a token does not see itself": Mutant(
        "apart >= 0 if spec.causal", "apart > 0 if spec.causal", FEATURES
    ),
    "ALiBi of the other sign": Mutant("apart = -_float32(", "apart = _float32(", FEATURES),
    "soft cap not scaled back": Mutant(
        "spec.logits_soft_cap * jnp.tanh(", "jnp.tanh(", FEATURES
    ),
    "dropped scale": Mutant(
        "_tile_queries(call, query, tiles) * call.scale",
        "_tile_queries(call, query, tiles)",
        FEATURES,
    ),
    "tiles of a prompt's size in every batch": Mutant(
        "tile = INVARIANT if call.batch_invariant else min(TILE, call.longest_query)",
        "tile = min(TILE, call.longest_query)",
        INVARIANT,
    ),
    "chunks of a table's size in every batch": Mutant(
        "chunk = CHUNK if call.batch_invariant else min(CHUNK, call.capacity)",
        "chunk = min(CHUNK, call.capacity)",
        INVARIANT,
    ),
    "segments joined in another order": Mutant(
        "(part * rooms.heads + head) * size",
        "((item.parts - 1 - part) * rooms.heads + head) * size",
        "tests/backends/test_cpu_prompts.py -k share_a_sequence",
    ),
    "query heads of the wrong group": Mutant(
        "rows.reshape(step, tile, call.num_kv_heads, call.group, call.head_dim)\n"
        "    return rows.transpose(0, 2, 3, 1, 4)",
        "rows.reshape(step, tile, call.group, call.num_kv_heads, call.head_dim)\n"
        "    return rows.transpose(0, 3, 2, 1, 4)",
        FEATURES,
    ),
    "hidden values not zeroed": Mutant(
        "    return jnp.where(_along(inside, rows), rows, 0)",
        "    return rows",
        POISON.format("xla"),
    ),
    "sums not rescaled to the new highest": Mutant(
        "total = state.total * kept + weights.sum(axis=3)",
        "total = state.total + weights.sum(axis=3)",
        "tests/backends/test_properties.py -k exact_at_100k and xla",
    ),
    "a gradient through the highest logit": Mutant(
        "jax.lax.stop_gradient(jnp.maximum(state.highest, logits.max(axis=3)))",
        "jnp.maximum(state.highest, logits.max(axis=3))",
        "tests/backends/test_grad.py -k as_exact_as",
    ),
    "missing weight in a merge": Mutant(
        "_weighted(out_b, weight_b)", "out_b", "tests/core/test_state.py"
    ),
    "lost copy-on-write": Mutant(
        "return (owners > 1) & (",
        "return (owners > 2) & (",
        "tests/pool/test_pool.py -k stays_shared",
    ),
    "shared blocks freed with their first owner": Mutant(
        '.get(mode="clip") == 0)\n    freed = jnp.where(unowned, blocks',
        '.get(mode="clip") >= 0)\n    freed = jnp.where(unowned, blocks',
        "tests/pool/test_pool_hostile.py",
    ),
    "a block shared twice with one sequence": Mutant(
        " & ~_named_before(blocks, used).any()", "", "tests/pool/test_pool_hostile.py"
    ),
    "a block given back that the next token sees": Mutant(
        "pool.seq_lens - window + 1", "pool.seq_lens - window + 2",
        "tests/pool/test_release_behind.py -k which_blocks",
    ),
    "a block that two sequences give back freed twice": Mutant(
        "unowned & _is_last_naming(pool, blocks)", "unowned",
        "tests/pool/test_release_behind.py -k others_hold",
    ),
    "a sequence of less than no tokens": Mutant(
        "made &= (num_tokens == 0) | used.any()", "made &= (num_tokens <= 0) | used.any()",
        "tests/pool/test_pool_hostile.py",
    ),
    "a block allocated twice": Mutant(
        "num_free=pool.num_free - need.sum(dtype=jnp.int32)",
        "num_free=pool.num_free - need.max()",
        "tests/pool/test_pool_hostile.py",
    ),
    "wrong slot in a block": Mutant(
        "blocks * block_size + positions % block_size, PAD_SLOT",
        "blocks * block_size + positions // block_size, PAD_SLOT",
        "tests/core/test_batch.py -k agree",
    ),
    "wrong slot in make_batch": Mutant(
        "block_size + positions % block_size\n    distinct", "block_size\n    distinct",
        "tests/core/test_batch.py -k by_hand",
    ),
    "a negative slot is the last one": Mutant(
        "wrap_negative_indices=False, unique_indices",
        "wrap_negative_indices=True, unique_indices",
        "tests/backends/test_bad_values.py -k not_written",
    ),
    "64 bits cut to 32": Mutant(
        "jnp.where(fits, jnp.asarray(narrow), -1)", "jnp.asarray(narrow)",
        "tests/pool/test_pool.py -k beyond_int32",
    ),
    "starts padded with zeros fall": Mutant(
        "jax.lax.cummax(int32(starts))",
        "int32(starts)",
        "tests/core/test_batch.py -k padded_with_zeros",
    ),
    "dropped clamp of the keys": Mutant(
        "batch.seq_lens.clamp(0, call.capacity) - first_keys", "batch.seq_lens - first_keys",
        "tests/backends/test_grouping.py",
    ),
    "dropped clamp of the queries": Mutant(
        "query_lens = query_lens.clamp(0, call.longest_query)",
        "query_lens = query_lens",
        "tests/backends/test_grouping.py",
    ),
    "turns of sdpa not weighed": Mutant(
        "(torch.stack(outs) * weights[..., None]).sum(0)", "torch.stack(outs).mean(0)",
        "tests/backends/test_sdpa_turns.py",
    ),
    "a sink that takes no weight": Mutant(
        "xp.exp(known - total), 0)", "xp.exp(known - known), 0)", SINKS
    ),
    "padding with sinks": Mutant(
        "starts) < starts.max()", "starts) <= starts.max()", SINKS
    ),
    "columns of a bias one off": Mutant(
        "dynamic_slice_in_dim(rows, keys[0, 0, 0], keys.shape[2], 4)",
        "dynamic_slice_in_dim(rows, keys[0, 0, 0] + 1, keys.shape[2], 4)",
        "tests/backends/test_bias.py -k many_chunks and xla",
    ),
    "torch: a bias at the wrong keys of a window": Mutant(
        "return self.rows.first_blocks[:, None] * self.call.block_size + keys",
        "return keys.expand(self.size, -1)",
        "tests/backends/test_bias.py -k window and sdpa",
    ),
    "torch: a bias beside what is hidden": Mutant(
        "(bias + self.added).masked_fill(self.added == -torch.inf, -torch.inf)",
        "bias + self.added",
        "tests/backends/test_bias.py -k window and sdpa",
    ),
    "a key's scale left out": Mutant(
        "return scaled(_without_padding(query, live), cache.key_scale, cache.num_kv_heads)",
        "return query",
        "tests/backends/test_quantised.py -k scales_of_every_kind and xla and int8",
    ),
    "padding tokens in the gradient of a scale": Mutant(
        "return rows if live is None else",
        "return rows if True else",
        "tests/backends/test_quantised.py -k scales_over_poison and xla",
    ),
    "autocast left on": Mutant(
        "if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):",
        "if False:",
        "tests/backends/test_torch_states.py -k autocast",
    ),
    "a value's scale of the wrong head": Mutant(
        "num_kv_heads, num_heads // num_kv_heads, head_dim)\n    product",
        "num_heads // num_kv_heads, num_kv_heads, head_dim).swapaxes(1, 2)\n    product",
        "tests/backends/test_quantised.py -k scales_of_every_kind and xla and int8",
    ),
    "writes that do not saturate": Mutant(
        "wide = xp.clip(wide, -bound, bound)",
        "wide = wide * 1",
        "tests/core/test_quantise.py -k saturates and jit",
    ),
    "int8 rounded to zero": Mutant(
        "wide = xp.round(xp.nan_to_num(wide))",
        "wide = xp.nan_to_num(wide)",
        "tests/core/test_quantise.py -k saturates and jit",
    ),
    "numba: a key's scale left out": Mutant(
        "scale = args.scale * factor(args.key_scale, args.key_scale_head, head)",
        "scale = args.scale",
        "tests/backends/test_numba_scales.py -k anything",
    ),
    "numba: the first head's scale for the values of all": Mutant(
        "factor(args.value_scale, args.value_scale_head, kv_head)",
        "factor(args.value_scale, args.value_scale_head, 0)",
        "tests/backends/test_numba_scales.py -k anything",
    ),
    "mosaic: a part that begins one step late": Mutant(
        "begin = jnp.clip(part * share - first_step, 0, blocks.count)",
        "begin = jnp.clip(part * share - first_step + 1, 0, blocks.count)",
        "tests/backends/test_mosaic_plans.py",
    ),
    "mosaic: a part that does not wait for the last one": Mutant(
        "last = lax.div(first_step + blocks.count - 1, share)",
        "last = lax.div(first_step + blocks.count - 1, share) - 1",
        "tests/backends/test_mosaic_plans.py",
    ),
    "writes that multiply by the reciprocal": Mutant(
        "divide = _divided if xp is jnp else operator.truediv",
        "divide = operator.truediv",
        "tests/core/test_quantise.py -k divides_as and jit",
    ),
    "float16 queries times scales in float16": Mutant(
        'dtypes={"float16": "float32"}',
        'dtypes={"float8": "float32"}',
        "tests/backends/test_quantised.py -k any_magnitude and xla",
    ),
    "a window whose end int32 does not hold": Mutant(
        "_LONGEST = 1 << 30", "_LONGEST = (1 << 31) - 1", "tests/core/test_visibility.py -k ranges"
    ),
    "a query behind the last key that its window shows": Mutant(
        "(positions - window < num_keys - 1)", "(positions - window < num_keys)",
        "tests/core/test_visibility.py -k who_sees",
    ),
    "a query before the first key that its window shows": Mutant(
        "(positions + window > 0)", "(positions + window >= 0)",
        "tests/core/test_visibility.py -k who_sees",
    ),
    "numbers that wrap to the other sign": Mutant(
        " & ((narrow < 0) == (values < 0))", "", "tests/core/test_int32.py -k minus_one"
    ),
    "most keys of a window one more": Mutant(
        "self.longest_query + self.window - 1", "self.longest_query + self.window",
        "tests/core/test_call.py",
    ),
    "torch: one key behind the window left in": Mutant(
        "keys > self.rows.contexts[:, None] - self.call.window",
        "keys >= self.rows.contexts[:, None] - self.call.window",
        POISON.format("sdpa"),
    ),
}  # fmt: skip
