"""Bugs to be seeded in the Mosaic kernels, and how the interpreter has to see each.

They test the interpreter: a wrong rule of it would hide bugs.
"""

from typing import NamedTuple

RACE, DEADLOCK, NUMBERS = "RACE DETECTED", "DEADLOCK", "AssertionError"
PHASE = f"{RACE}|observed"  # or a phase of a barrier that nobody has seen, whichever is first


class Bug(NamedTuple):
    """A piece of text that stands once in the library, what replaces it, and how that is seen."""

    text: str
    mistake: str
    caught: str  # a pattern of what stands in the error
    case: str = "rings turn"


BUGS = {
    "phase: the first wait for room is left out": Bug(
        "        @pl.when(step >= self.room.shape[0])",
        "        @pl.when(step > self.room.shape[0])",
        RACE,
    ),
    "ring: values are awaited in the other slot": Bug(
        "        slot = self.slot(step)\n",
        "        slot = self.slot(step + 1)\n",
        RACE,
    ),
    "no wait for values": Bug(
        "        plgpu.barrier_wait(self.barriers.value_full.at[slot])\n        plgpu.wgmma",
        "        plgpu.wgmma",
        RACE,
    ),
    "no wait for keys": Bug(
        "        plgpu.barrier_wait(self.barriers.key_full.at[self.slot(step)])\n", "", RACE
    ),
    "no wait for room for keys and values": Bug(
        "            plgpu.barrier_wait(self.free.at[self.slot(step)])\n",
        "            pass\n",
        RACE,
    ),
    "page: the next entry of the table": Bug(
        "index = jnp.minimum(lax.div(begin, jnp.int32(config.block_size)), config.max_blocks - 1)",
        "index = jnp.minimum(begin // config.block_size + 1, config.max_blocks - 1)",
        NUMBERS,
    ),
    "page: those of a step in the wrong order": Bug(
        "target = room.at[pl.ds(page * self.rows, self.rows)]",
        "target = room.at[pl.ds((self.config.pages - 1 - page) * self.rows, self.rows)]",
        RACE,  # with the rows of a page that ends within a step
    ),
    "values not released": Bug(
        "        result = pl.run_scoped(products, *accumulators)\n"
        "        plgpu.barrier_arrive(self.barriers.value_free.at[self.slot(before)])\n",
        "        result = pl.run_scoped(products, *accumulators)\n",
        DEADLOCK,
    ),
    "no first turn": Bug(
        "        plgpu.barrier_arrive(barriers.turn.at[0])\n", "        pass\n", DEADLOCK
    ),
    "lengths: one key too many": Bug(
        "return Rows(None, None, None, tile.key_len - 1)",
        "return Rows(None, None, None, tile.key_len)",
        NUMBERS,
        "all keys",
    ),
    "causality: one key too many": Bug(
        "        last = jnp.minimum(last, position)\n",
        "        last = jnp.minimum(last, position + 1)\n",
        NUMBERS,
    ),
    "window: one key too many": Bug(
        "position - (window - 1), last", "position - window, last", NUMBERS, "window, cap"
    ),
    "trees: a token does not see itself": Bug(
        "return words[..., 1:] << shift |", "return words[..., 1:] << shift + 1 |", NUMBERS, "trees"
    ),
    "trees: the words of another step": Bug(
        "block * count - begin + count, 0, known",
        "block * count - begin, 0, known",
        NUMBERS,
        "trees",
    ),
    "trees: keys of the new tokens in steps that no line hides": Bug(
        "    if not config.words:  # else", "    if True:  # else", NUMBERS, "trees"
    ),
    "keys released before their product is awaited": Bug(
        "            x = plgpu.wgmma_accumulator_load(x_ref, wait_n=1)\n"
        "            exponents = walk.release_keys(step)",
        "            exponents = walk.release_keys(step)\n"
        "            x = plgpu.wgmma_accumulator_load(x_ref, wait_n=1)",
        RACE,
    ),
    "a product awaited too late": Bug(
        "            x = plgpu.wgmma_accumulator_load(x_ref, wait_n=1)\n            exp",
        "            x = plgpu.wgmma_accumulator_load(x_ref, wait_n=2)\n            exp",
        RACE,
    ),
    "per-token scales: keys released before their exponents are read": Bug(
        "            exponents = Exponents(*(scales.exponents[i] for i in places))\n"
        "        plgpu.barrier_arrive(self.barriers.key_free.at[slot])\n",
        "            plgpu.barrier_arrive(self.barriers.key_free.at[slot])\n"
        "            exponents = Exponents(*(scales.exponents[i] for i in places))\n",
        RACE,
        "per-token scales",
    ),
    "per-token scales: sums that keep an earlier exponent": Bug(
        "            correction = correction * jnp.exp2(before - exponent)\n",
        "            pass\n",
        NUMBERS,
        "per-token scales",
    ),
    "results stored before they are committed": Bug(
        "    memory.results.at[slot, warpgroup][...] = out\n    plgpu.commit_smem()\n",
        "    memory.results.at[slot, warpgroup][...] = out\n",
        RACE,
    ),
    "room for queries released while results are stored": Bug(
        "        plgpu.wait_smem_to_gmem(0, wait_read_only=True)\n        slot =",
        "        slot =",
        RACE,
        "many tiles of a program",
    ),
    "values behind the end are not zeroed": Bug(
        "        block = jnp.where(seen, block, self.config.num_blocks)\n        room",
        "        room",
        NUMBERS,
    ),
    "cut keys: no wait for the results of others": Bug(
        '        plgpu.semaphore_wait(arrays.finished.at[place], memory_scope="gpu")\n'
        "        top, total",
        "        top, total",
        RACE,
        "cut decodes",
    ),
    "cut keys: no signal": Bug(
        '        plgpu.semaphore_signal(arrays.finished.at[place], memory_scope="gpu")\n',
        "",
        DEADLOCK,
        "cut decodes",
    ),
    "sums not shrunk to the new highest": Bug(
        "return out * wide(correction, out), state", "return out, state", NUMBERS
    ),
    "a barrier that counts pages only": Bug(
        "return max(config.pages, WARPS)",
        "return config.pages",
        PHASE,
        "whole tiles",
    ),
    "eight bits: no wait for what is loaded": Bug(
        "    plgpu.barrier_wait(held.full.at[slot])\n    numbers = load(",
        "    numbers = load(",
        PHASE,
        "eight bits",
    ),
    "eight bits: no wait for room": Bug(
        "            plgpu.barrier_wait(self.free.at[self.slot(step)])\n",
        "            pass\n",
        RACE,
        "eight bits",
    ),
    "eight bits: room for loads released before it is read": Bug(
        "    plgpu.commit_smem()  # all warps have read\n"
        "    plgpu.barrier_arrive(held.free.at[slot])\n    return numbers",
        "    plgpu.barrier_arrive(held.free.at[slot])\n    return numbers",
        RACE,
        "eight bits",
    ),
    "eight bits: keys not committed": Bug(
        "widened(numbers, factors)\n    plgpu.commit_smem()\n",
        "widened(numbers, factors)\n",
        RACE,
        "eight bits",
    ),
    "eight bits: queries not committed": Bug(
        "    plgpu.commit_smem()  # all warps have written\n    return down",
        "    return down",
        RACE,
        "eight bits",
    ),
    "eight bits: queries without a factor": Bug(
        "    up = jnp.minimum(2 * BIAS + exponent - exponent_of(largest), MOST)\n",
        "    up = jnp.full_like(exponent_of(largest), BIAS)\n",
        NUMBERS,
        "eight bits",
    ),
    "eight bits: weights of 1 at most": Bug(
        "return 15 if dtype == jnp.float16 else 0", "return 0", NUMBERS, "eight bits"
    ),
    "eight bits: results' memory released with the tile": Bug(
        "            pl.when(step == 1)(self.release_results)\n",
        "            pl.when(step == 2)(self.release_results)\n",
        DEADLOCK,
        "eight bits",
    ),
    "eight bits: scales of another head": Bug(
        "return Scales(*(scale[self.task.head] for scale in self.arrays.scales))",
        "return Scales(*(scale[1 - self.task.head] for scale in self.arrays.scales))",
        NUMBERS,
        "eight bits, window, group of 4",
    ),
    "per-token scales: exponents written before there is room": Bug(
        "        for place, exponent in zip(exponent_places(slot), exponents, strict=True):\n",
        "        for place, exponent in zip(exponent_places(1 - slot), exponents, strict=True):\n",
        RACE,
        "per-token scales",
    ),
    "per-token scales: those of values of another step": Bug(
        "        self.widen_values(step - 1, waiting)\n",
        "        self.widen_values(step - 1, new)\n",
        NUMBERS,
        "per-token scales",
    ),
    "latents: keys released before their product is awaited": Bug(
        "            summed = plgpu.wgmma_accumulator_load(out_ref, wait_n=1)\n"
        "            release(self.values_free(self.other))\n",
        "            release(self.values_free(self.other))\n"
        "            summed = plgpu.wgmma_accumulator_load(out_ref, wait_n=1)\n",
        RACE,
        "latents",
    ),
    "latents: weights not committed": Bug(
        "            self.hide_values(step)\n        plgpu.commit_smem()\n",
        "            self.hide_values(step)\n",
        RACE,
        "latents",
    ),
    "latents: no wait for the other's weights": Bug(
        "        plgpu.barrier_wait(self.barriers.weights.at[slot])\n", "", RACE, "latents"
    ),
    "latents of few heads: chunks released before their product is awaited": Bug(
        "                plgpu.wgmma_wait(behind)\n"
        "                plgpu.barrier_arrive(self.ring.free.at[slot])\n",
        "                plgpu.barrier_arrive(self.ring.free.at[slot])\n"
        "                plgpu.wgmma_wait(behind)\n",
        RACE,
        "latents, 16 heads",
    ),
    "latents of few heads: no wait for a chunk": Bug(
        "                plgpu.barrier_wait(self.ring.full.at[slot])\n"
        "                zero = opaque(0)\n",
        "                zero = opaque(0)\n",
        RACE,
        "latents, 16 heads",
    ),
    "latents of few heads: weights not committed": Bug(
        "        self.hide_values(i, slots)\n        plgpu.commit_smem()\n",
        "        self.hide_values(i, slots)\n",
        RACE,
        "latents, 16 heads",
    ),
    "latents of eight bits: no wait for keys": Bug(
        "        plgpu.barrier_wait(self.rings.latents.full.at[place])\n        return place",
        "        return place",
        PHASE,
        "latents of eight bits, 8 heads",
    ),
    "latents of eight bits: values released while they are read": Bug(
        "        plgpu.commit_smem()  # the values have been read\n",
        "",
        RACE,
        "latents of eight bits, 8 heads",
    ),
    "latents of eight bits: weights not committed": Bug(
        "        return any_too_large(sizes)\n",
        "        return jnp.int32(0)\n",
        RACE,
        "latents of eight bits, 8 heads",
    ),
    "latents of eight bits: weights overwritten while they are read": Bug(
        "        place = self.rings.weights.free_slot(self.work_item.done + i)\n",
        "        place = self.rings.weights.slot(self.work_item.done + i)\n",
        RACE,
        "latents of eight bits, 8 heads",
    ),
    "latents of eight bits: sums of weights that do not follow a new top": Bug(
        "State(top, state.weights * wide(correction, x, 1) + weights)",
        "State(top, state.weights + weights)",
        NUMBERS,
        "latents of eight bits, logits far apart",
    ),
    "latents of eight bits: sums of values that do not follow a new top": Bug(
        "            self.put(place, weights, scale, correction)\n",
        "            self.put(place, weights, scale, of_heads(self.config, 1.0))\n",
        NUMBERS,
        "latents of eight bits, logits far apart",
    ),
    "latents of eight bits: queries not committed": Bug(
        "    store(memory.query_factors, down)\n    plgpu.commit_smem()\n",
        "    store(memory.query_factors, down)\n",
        RACE,
        "latents of eight bits, 8 heads",
    ),
    "latents of eight bits: scales of another step": Bug(
        "gather(self.memory.scales.at[self.place(i)]",
        "gather(self.memory.scales.at[self.place(i + 1)]",
        f"{NUMBERS}|{RACE}",
        "latents of eight bits, per-token scales",
    ),
    "latents of eight bits: scales of hidden keys": Bug(
        "        return jnp.where(row < self.work_item.visible_keys(i), found, 0.0)\n",
        "        return found\n",
        NUMBERS,
        "latents of eight bits, per-token scales",
    ),
    "latents: first pages of another work item": Bug(
        "lax.cond(index == 0, lambda: begin",
        "lax.cond(index >= 0, lambda: begin",
        NUMBERS,
        "latents of eight bits, per-token scales",
    ),
    "latents: hidden pages": Bug(
        "jnp.where((begin >= 0) & (begin < work_item.limit), entry, config.num_blocks)",
        "entry",
        NUMBERS,
        "latents",
    ),
    "latents of eight bits: what queries have beyond float8 left out": Bug(
        "        rest = rest - parts[-1].astype(jnp.float32)\n",
        "        rest = jnp.zeros_like(rest)\n",
        NUMBERS,
        "latents of eight bits, per-token scales",
    ),
    "cut tokens: sums of others not awaited": Bug(
        '        plgpu.semaphore_wait(arrays.finished.at[place], memory_scope="gpu")\n'
        "        return 2 * distance",
        "        return 2 * distance",
        RACE,
        "latents of one sequence",
    ),
    "cut tokens: one part too few": Bug(
        "& (distance <= behind)",
        "& (distance < behind)",
        NUMBERS,
        "latents of one sequence, 8 heads",
    ),
}
# What it cannot see, since a warpgroup is one thread to it: fences among a warpgroup's own warps.
UNSEEN = (
    "    plgpu.commit_smem()  # all warps have read their queries\n"
    "    memory.results.at[slot, warpgroup][...] = out\n",
    "        plgpu.commit_smem()  # all warps have written, before one of them says so\n"
    "        plgpu.semaphore_signal(",
)
# One of each kind, for every run: test-deep has them all.
FEW = (
    "per-token scales: exponents written before there is room",
    "no wait for keys",
    "values not released",
    "keys released before their product is awaited",
    "results stored before they are committed",
    "cut keys: no wait for the results of others",
    "trees: keys of the new tokens in steps that no line hides",
    "cut tokens: sums of others not awaited",
    "latents of few heads: no wait for a chunk",
    "latents of eight bits: weights overwritten while they are read",
)
