"""What went wrong inside a call, as text that XLA can carry."""

import traceback


class CallError(Exception):
    """A torch function that XLA called has raised; the text is its traceback."""


def text_of(error: BaseException) -> str:
    """The traceback of an error, whatever its own text is; in plain UTF-8.

    XLA's side ends the process when the text of an exception cannot be had or encoded.
    """
    try:
        text = "".join(traceback.format_exception(error))
    except BaseException:
        text = f"{type(error).__name__}, which cannot be printed"
    return text.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()
