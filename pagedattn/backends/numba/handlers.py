"""The functions that XLA calls: without Python and the GIL, on any of its threads."""

from ctypes import sizeof

from ..._kernels.cpu.call_args import job_at
from ..._kernels.cpu.compiled import TASKS
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
from ..._kernels.cpu.schedule import JOB_BYTES, begin
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
def describe(frame, job):
    """Fills a job from a frame: arrays and sizes from its buffers, options from its attributes."""
    query, key = item(frame, ARGUMENTS, 0), item(frame, ARGUMENTS, 1)
    value, tables = item(frame, ARGUMENTS, 2), item(frame, ARGUMENTS, 3)
    job.query, job.key, job.value = at(query, DATA), at(key, DATA), at(value, DATA)
    job.tables = at(tables, DATA)
    job.seq_lens = at(item(frame, ARGUMENTS, 4), DATA)
    job.starts = at(item(frame, ARGUMENTS, 5), DATA)
    job.out = at(item(frame, RESULTS, 0), DATA)
    job.lse = 0
    if at(frame, NUM_RESULTS) > 1:
        job.lse = at(item(frame, RESULTS, 1), DATA)
    job.num_tokens, num_heads = get_int64(at(query, DIMS), 0), get_int64(at(query, DIMS), 1)
    cache, out = at(key, DIMS), at(item(frame, RESULTS, 0), DIMS)
    job.num_blocks, job.block_size = get_int64(cache, 0), get_int64(cache, 1)
    job.num_kv_heads, job.head_dim = get_int64(cache, 2), get_int64(cache, 3)
    job.value_dim = get_int64(out, 2)
    job.group = num_heads // job.num_kv_heads
    job.num_seqs, job.max_blocks = get_int64(at(tables, DIMS), 0), get_int64(at(tables, DIMS), 1)
    numbers, integers = item(frame, ATTRIBUTES, 0), item(frame, ATTRIBUTES, 1)
    floats, count = at(numbers, ARRAY_DATA), at(numbers, ARRAY_SIZE)
    job.scale, job.soft_cap = get_float32(floats, 0), get_float32(floats, 1)
    job.unit = get_float32(floats, 2)
    job.slopes = floats + 12 if count > 3 else 0
    options = at(integers, ARRAY_DATA)
    job.causal, job.window = get_int64(options, 0), get_int64(options, 1)
    job.longest, job.threads = get_int64(options, 2), get_int64(options, 3)
    job.itemsize, job.cache_itemsize = get_int64(options, 4), get_int64(options, 5)
    set_dense_strides(job, get_int64(at(value, DIMS), 3))
    set_arrays_beside(job, frame, options + 48)


@fast
def set_arrays_beside(job, frame, brings):
    """The arrays that not all calls bring; they follow the others."""
    job.bias, job.key_scale, job.value_scale = 0, 0, 0
    index = 6
    if get_int64(brings, 0) != 0:
        set_bias(job, item(frame, ARGUMENTS, index))
        index += 1
    if get_int64(brings, 1) != 0:
        scale = item(frame, ARGUMENTS, index)
        job.key_scale, job.key_scale_head = at(scale, DATA), 4 * min(1, at(scale, RANK))
        index += 1
    if get_int64(brings, 2) != 0:
        scale = item(frame, ARGUMENTS, index)
        job.value_scale, job.value_scale_head = at(scale, DATA), 4 * min(1, at(scale, RANK))


@fast
def set_dense_strides(job, value_columns):
    """XLA's arrays are dense."""
    job.query_head = job.head_dim * job.itemsize
    job.query_token = job.query_head * job.num_kv_heads * job.group
    job.key_head = job.head_dim * job.cache_itemsize
    job.value_head = value_columns * job.cache_itemsize
    job.key_slot = job.key_head * job.num_kv_heads
    job.value_slot = job.value_head * job.num_kv_heads
    job.key_block, job.value_block = job.key_slot * job.block_size, job.value_slot * job.block_size
    job.table_row = 4 * job.max_blocks


@fast
def set_bias(job, bias):
    """A bias of one head is that of all."""
    heads, columns = get_int64(at(bias, DIMS), 1), get_int64(at(bias, DIMS), 2)
    job.bias, job.bias_columns = at(bias, DATA), columns
    job.bias_token = 4 * heads * columns
    job.bias_head = 4 * columns if heads > 1 else 0


@fast
def attention(frame, code):
    """Handles a call of attention: this thread works on it, and XLA's others are invited.

    `code` says which `task` does so, by its dtypes.
    """
    if asks_for_metadata(frame):
        return 0
    call = malloc(JOB_BYTES)
    describe(frame, job_at(call))
    job, task = begin(call), get_int64(tasks(), code)
    free(call)
    invite(frame, job, task)
    call_at(task, job)
    end(job)
    return 0


@fast
def invite(frame, job, task):
    """Hands the job to XLA's thread pool. Whoever comes late finds no work, and harms nothing."""
    helpers = job_at(job).threads - 1
    if helpers == 0:
        return
    api, request = at(frame, API), malloc(SCHEDULE_BYTES)  # a `ffi.Schedule`
    put_int64(request, 0, SCHEDULE_BYTES)
    put_int64(request, 1, 0)
    put_int64(request, 2, at(frame, CONTEXT))
    put_int64(request, 3, task)
    put_int64(request, 4, job)
    for _ in range(helpers):
        error = call_at(at(api, SCHEDULE), request)
        if error != 0:  # this helper will not come: it leaves the job here
            destroy(api, error)
            leave(job)
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
