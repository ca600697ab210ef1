"""What XLA hands to a foreign function on a CPU: the structs of xla/ffi/api/c_api.h, version 0.3.

XLA keeps this interface for at least a year after it changes, and says which version it speaks.
"""

import ctypes
from ctypes import POINTER, c_int, c_int64, c_size_t, c_uint32, c_void_p

VERSION = 0, 3


class Struct(ctypes.Structure):
    """All structs begin alike."""

    _fields_ = [("struct_size", c_size_t), ("extension_start", c_void_p)]


class Version(Struct):
    _fields_ = [("major", c_int), ("minor", c_int)]


class Buffer(Struct):
    _fields_ = [("dtype", c_int), ("data", c_void_p), ("rank", c_int64), ("dims", c_void_p)]


class Array(ctypes.Structure):
    """An attribute that is an array."""

    _fields_ = [("dtype", c_int), ("size", c_size_t), ("data", c_void_p)]


class Buffers(Struct):
    _fields_ = [("size", c_int64), ("types", c_void_p), ("items", c_void_p)]


class Attributes(Struct):
    """Sorted by name."""

    _fields_ = [("size", c_int64), ("types", c_void_p), ("names", c_void_p), ("items", c_void_p)]


class Frame(Struct):
    _fields_ = [
        ("api", c_void_p),
        ("context", c_void_p),
        ("stage", c_int),
        ("arguments", Buffers),
        ("results", Buffers),
        ("attributes", Attributes),
        ("future", c_void_p),
    ]


class Metadata(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("version", Version),
        ("traits", c_uint32),
        ("state_type", c_int64),
    ]


class Extension(ctypes.Structure):
    """What XLA adds to a frame in which it asks for metadata, in place of a call."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("type", c_int),
        ("next", c_void_p),
        ("metadata", POINTER(Metadata)),
    ]


class Api(Struct):
    _fields_ = [("version", Version), ("internal", c_void_p)] + [
        (name, c_void_p)
        for name in (
            *("error_create", "error_message", "error_destroy", "register", "stream", "type"),
            *("context", "set_state", "get_state", "allocate", "free", "schedule", "num_threads"),
        )
    ]


class Schedule(Struct):
    """The arguments of `Api.schedule`."""

    _fields_ = [("context", c_void_p), ("task", c_void_p), ("data", c_void_p)]


class ErrorDestroy(Struct):
    """The arguments of `Api.error_destroy`."""

    _fields_ = [("error", c_void_p)]
