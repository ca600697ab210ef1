"""An error inside a call, as text that XLA can pass on."""

import traceback


class CallError(Exception):
    """A torch function that XLA called has raised; the text is its traceback."""


def text_of(error: BaseException) -> str:
    """The traceback of an error in valid UTF-8, without zero bytes; it never raises.

    XLA's side ends the process if it cannot get the text of an exception, or cannot encode it.
    """
    try:
        text = "".join(traceback.format_exception(error))
    except BaseException:
        text = f"{type(error).__name__}, which cannot be printed"
    return text.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()
