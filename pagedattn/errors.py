"""The errors of pagedattn. Each text says what was expected, what was got, and how to mend it."""


class PagedAttentionError(Exception):
    """Base of every error that pagedattn raises on purpose."""


class InvalidInputError(PagedAttentionError, ValueError):
    """An argument has a wrong shape, dtype or value. Nothing has been written."""


class UnsupportedError(PagedAttentionError, NotImplementedError):
    """A backend does not support an option of this call; the text names the option."""


class BackendUnavailableError(PagedAttentionError, ImportError):
    """A backend is unknown, or a package that it needs is not installed."""


class OutOfBlocksError(PagedAttentionError, MemoryError):
    """Sequences of a step found no free blocks: they are as they were, others have grown."""
