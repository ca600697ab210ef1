"""The functions that XLA calls: without Python and the GIL, on any of its threads."""

from ctypes import sizeof

from ..._kernels.cpu.block_choice import begin_choice
from ..._kernels.cpu.block_scores import begin_scores
from ..._kernels.cpu.call_args import args_at
from ..._kernels.cpu.compiled import CHOICE, PREFILLS, SCORES, TASKS
from ..._kernels.cpu.compiling import fast
from ..._kernels.cpu.memory import (
    call_at,
    free,
    get_float32,
    get_int32,
    get_int64,
    malloc,
    memcpy,
    put_int32,
    put_int64,
    symbol,
)
from ..._kernels.cpu.schedule import CALL_ARGS_BYTES, begin
from ..._kernels.cpu.workers import end, leave
from . import frame as ffi

EXTENSION = ffi.Frame.extension_start.offset
METADATA = ffi.Extension.metadata.offset
MAJOR, MINOR = (
    ffi.Metadata.version.offset + field.offset for field in (ffi.Version.major, ffi.Version.minor)
)
VERSION = ffi.VERSION
API, CONTEXT = ffi.Frame.api.offset, ffi.Frame.context.offset
ARGUMENTS = ffi.Frame.arguments.offset + ffi.Buffers.items.offset
RESULTS = ffi.Frame.results.offset + ffi.Buffers.items.offset
NUM_RESULTS = ffi.Frame.results.offset + ffi.Buffers.size.offset
ATTRIBUTES = ffi.Frame.attributes.offset + ffi.Attributes.items.offset
DATA, RANK, DIMS = (field.offset for field in (ffi.Buffer.data, ffi.Buffer.rank, ffi.Buffer.dims))
ARRAY_DATA, ARRAY_SIZE = ffi.Array.data.offset, ffi.Array.size.offset
SCHEDULE_BYTES, DESTROY_BYTES = sizeof(ffi.Schedule), sizeof(ffi.ErrorDestroy)
SCHEDULE, ERROR_DESTROY = ffi.Api.schedule.offset, ffi.Api.error_destroy.offset

tasks = symbol(TASKS)


@fast
def at(address, offset):
    """The word at an offset."""
    return get_int64(address + offset, 0)


@fast
def item(frame, items, index):
    """A buffer or an attribute of a frame."""
    return get_int64(at(frame, items), index)


@fast
def asks_for_metadata(frame):
    """Whether XLA asks what this function is, which is answered here, rather than calls it."""
    extension = at(frame, EXTENSION)
    if extension == 0:
        return False
    metadata = at(extension, METADATA)
    put_int32(metadata + MAJOR, 0, VERSION[0])
    put_int32(metadata + MINOR, 0, VERSION[1])
    return True


@fast
def describe(frame, args):
    """Fills a call from a frame: arrays and sizes from its buffers, options from its attributes."""
    query, key = item(frame, ARGUMENTS, 0), item(frame, ARGUMENTS, 1)
    value, tables = item(frame, ARGUMENTS, 2), item(frame, ARGUMENTS, 3)
    args.query, args.key, args.value = at(query, DATA), at(key, DATA), at(value, DATA)
    args.tables = at(tables, DATA)
    args.seq_lens = at(item(frame, ARGUMENTS, 4), DATA)
    args.starts = at(item(frame, ARGUMENTS, 5), DATA)
    args.out = at(item(frame, RESULTS, 0), DATA)
    args.lse = 0
    if at(frame, NUM_RESULTS) > 1:
        args.lse = at(item(frame, RESULTS, 1), DATA)
    args.num_tokens, num_heads = get_int64(at(query, DIMS), 0), get_int64(at(query, DIMS), 1)
    cache, out = at(key, DIMS), at(item(frame, RESULTS, 0), DIMS)
    args.num_blocks, args.block_size = get_int64(cache, 0), get_int64(cache, 1)
    args.num_kv_heads, args.head_dim = get_int64(cache, 2), get_int64(at(query, DIMS), 2)
    args.value_dim = get_int64(out, 2)
    args.group = num_heads // args.num_kv_heads
    args.num_seqs, args.max_blocks = get_int64(at(tables, DIMS), 0), get_int64(at(tables, DIMS), 1)
    numbers, integers = item(frame, ATTRIBUTES, 0), item(frame, ATTRIBUTES, 1)
    floats, count = at(numbers, ARRAY_DATA), at(numbers, ARRAY_SIZE)
    args.scale, args.soft_cap = get_float32(floats, 0), get_float32(floats, 1)
    args.unit = get_float32(floats, 2)
    args.slopes = floats + 12 if count > 3 else 0
    options = at(integers, ARRAY_DATA)
    args.causal, args.window = get_int64(options, 0), get_int64(options, 1)
    args.longest, args.threads = get_int64(options, 2), get_int64(options, 3)
    args.most_heads = get_int64(options, 4)
    args.itemsize, args.cache_itemsize = get_int64(options, 5), get_int64(options, 6)
    held, value_held = get_int64(cache, 3), get_int64(at(value, DIMS), 3)
    args.value_columns = value_held * (args.head_dim // held)
    set_dense_strides(args, held, value_held)
    set_arrays_beside(args, frame, options + 56)


@fast
def set_arrays_beside(args, frame, brings):
    """The arrays that not all calls bring; they follow the others."""
    args.bias, args.key_scale, args.value_scale = 0, 0, 0
    args.key_scales, args.value_scales, args.selection = 0, 0, 0
    args.depths, args.ancestors, args.words = 0, 0, 0
    index = 6
    if get_int64(brings, 0) != 0:
        set_bias(args, item(frame, ARGUMENTS, index))
        index += 1
    if get_int64(brings, 1) != 0:
        scale = item(frame, ARGUMENTS, index)
        if at(scale, RANK) > 1:
            args.key_scales = at(scale, DATA)
        else:
            args.key_scale, args.key_scale_head = at(scale, DATA), 4 * at(scale, RANK)
        index += 1
    if get_int64(brings, 2) != 0:
        scale = item(frame, ARGUMENTS, index)
        if at(scale, RANK) > 1:
            args.value_scales = at(scale, DATA)
        else:
            args.value_scale, args.value_scale_head = at(scale, DATA), 4 * at(scale, RANK)
        index += 1
    if get_int64(brings, 3) != 0:
        blocks = item(frame, ARGUMENTS, index)
        args.selection, args.num_selected = at(blocks, DATA), get_int64(at(blocks, DIMS), 2)
        index += 1
    if get_int64(brings, 4) != 0:
        ancestors = item(frame, ARGUMENTS, index + 1)
        args.depths, args.ancestors = at(item(frame, ARGUMENTS, index), DATA), at(ancestors, DATA)
        args.words = get_int64(at(ancestors, DIMS), 1)


@fast
def set_dense_strides(args, held, value_held):
    """XLA's arrays are dense; rows of the cache have so many numbers, or bytes with two in each."""
    args.query_head = args.head_dim * args.itemsize
    args.query_token = args.query_head * args.num_kv_heads * args.group
    args.key_head, args.value_head = held * args.cache_itemsize, value_held * args.cache_itemsize
    args.key_slot = args.key_head * args.num_kv_heads
    args.value_slot = args.value_head * args.num_kv_heads
    args.key_block, args.value_block = (
        args.key_slot * args.block_size,
        args.value_slot * args.block_size,
    )
    args.table_row = 4 * args.max_blocks


@fast
def set_bias(args, bias):
    """A bias of one head is that of all."""
    heads, columns = get_int64(at(bias, DIMS), 1), get_int64(at(bias, DIMS), 2)
    args.bias, args.bias_columns = at(bias, DATA), columns
    args.bias_token = 4 * heads * columns
    args.bias_head = 4 * columns if heads > 1 else 0


@fast
def attention(frame, code):
    """Handles a call of attention: this thread works on it, and XLA's others are invited.

    `code` says which `task` does so, by its dtypes, and which `prefill` if that is compiled.
    """
    if asks_for_metadata(frame):
        return 0
    call = malloc(CALL_ARGS_BYTES)
    describe(frame, args_at(call))
    args_at(call).prefill = get_int64(tasks(), PREFILLS + code)
    return run(frame, call, begin(call), code)


@fast
def describe_scores(frame, args):
    """Fills a call from a frame, as block_scores.py takes it."""
    query, key = item(frame, ARGUMENTS, 0), item(frame, ARGUMENTS, 1)
    tables = item(frame, ARGUMENTS, 3)
    args.query, args.key, args.tables = at(query, DATA), at(key, DATA), at(tables, DATA)
    args.value = at(item(frame, ARGUMENTS, 2), DATA)
    args.seq_lens = at(item(frame, ARGUMENTS, 4), DATA)
    args.out = at(item(frame, RESULTS, 0), DATA)
    args.group, args.num_blocks = get_int64(at(query, DIMS), 2), get_int64(at(key, DIMS), 0)
    args.num_kv_heads, args.head_dim = get_int64(at(key, DIMS), 1), get_int64(at(key, DIMS), 2)
    args.num_seqs, args.max_blocks = get_int64(at(tables, DIMS), 0), get_int64(at(tables, DIMS), 1)
    options = at(item(frame, ATTRIBUTES, 0), ARRAY_DATA)
    args.num_planes, args.threads = get_int64(options, 0), get_int64(options, 1)
    args.query_head = args.head_dim * get_int64(options, 2)
    args.key_head = args.head_dim * get_int64(options, 3)
    args.query_token = args.query_head * args.num_kv_heads
    args.key_block = args.key_head * args.num_kv_heads
    args.scale = get_int64(options, 4)
    args.table_row = 4 * args.max_blocks


@fast
def scores(frame, code):
    """Handles a call of scores of blocks, as `attention` does."""
    if asks_for_metadata(frame):
        return 0
    call = malloc(CALL_ARGS_BYTES)
    describe_scores(frame, args_at(call))
    return run(frame, call, begin_scores(call), SCORES + code)


@fast
def run(frame, call, args, code):
    """Works with others on arguments that were made of a call, which is freed."""
    free(call)
    task = get_int64(tasks(), code)
    invite(frame, args, task)
    call_at(task, args)
    end(args)
    return 0


@fast
def invite(frame, args, task):
    """Hands the call to XLA's thread pool. Whoever comes late finds no work, and harms nothing."""
    helpers = args_at(args).threads - 1
    if helpers == 0:
        return
    api, request = at(frame, API), malloc(SCHEDULE_BYTES)  # a `ffi.Schedule`
    put_int64(request, 0, SCHEDULE_BYTES)
    put_int64(request, 1, 0)
    put_int64(request, 2, at(frame, CONTEXT))
    put_int64(request, 3, task)
    put_int64(request, 4, args)
    for _ in range(helpers):
        error = call_at(at(api, SCHEDULE), request)
        if error != 0:  # this helper will not come: it leaves the call here
            destroy(api, error)
            leave(args)
    free(request)


@fast
def destroy(api, error):
    """Frees an error of XLA's; there is nothing to do about it, since this thread works anyway."""
    request = malloc(DESTROY_BYTES)  # a `ffi.ErrorDestroy`
    put_int64(request, 0, DESTROY_BYTES)
    put_int64(request, 1, 0)
    put_int64(request, 2, error)
    call_at(at(api, ERROR_DESTROY), request)
    free(request)


@fast
def choose_best(frame):
    """Handles the choice of the best blocks of each row of scores, as `attention` does."""
    if asks_for_metadata(frame):
        return 0
    call = malloc(CALL_ARGS_BYTES)
    describe_choice(frame, args_at(call))
    return run(frame, call, begin_choice(call), CHOICE)


@fast
def describe_choice(frame, args):
    """Fills a call from a frame, as block_choice.py takes it."""
    scores, chosen = item(frame, ARGUMENTS, 0), item(frame, RESULTS, 0)
    args.query, args.out = at(scores, DATA), at(chosen, DATA)
    args.num_seqs = get_int64(at(scores, DIMS), 0) * get_int64(at(scores, DIMS), 1)
    args.max_blocks = get_int64(at(scores, DIMS), 2)
    args.num_selected = get_int64(at(chosen, DIMS), 2)
    args.threads = get_int64(at(item(frame, ATTRIBUTES, 0), ARRAY_DATA), 0)


@fast
def set_rows(frame):
    """Handles the setting of rows, in place: the array is the result too. Others are dropped."""
    if asks_for_metadata(frame):
        return 0
    indices, rows = item(frame, ARGUMENTS, 1), item(frame, ARGUMENTS, 2)
    count = get_int64(at(indices, DIMS), 0)
    options = at(item(frame, ATTRIBUTES, 0), ARRAY_DATA)
    num_rows, row_bytes = get_int64(options, 0), get_int64(options, 1)
    target = at(item(frame, RESULTS, 0), DATA)
    for i in range(count):
        index = get_int32(at(indices, DATA), i)
        if index >= 0 and index < num_rows:
            memcpy(target + index * row_bytes, at(rows, DATA) + i * row_bytes, row_bytes)
    return 0
