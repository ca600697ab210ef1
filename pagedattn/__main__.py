"""`python -m pagedattn`: what each backend can do on this machine, and why not."""

import jax

from . import __version__
from .table import cells, render

if __name__ == "__main__":
    print(f"pagedattn {__version__}, jax {jax.__version__} on {jax.devices()[0]}\n")
    print(render(cells()))
