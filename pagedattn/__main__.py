"""`python -m pagedattn`: what each backend can do on this machine, and why not."""

from importlib.metadata import version

import jax

from .table import cells, render

if __name__ == "__main__":
    print(f"pagedattn {version('pagedattn')}, jax {jax.__version__} on {jax.devices()[0]}\n")
    print(render(cells()))
