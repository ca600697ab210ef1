"""Files that need JAX's interpreter are no tests: their docstrings are not collected."""

collect_ignore_glob = ["mosaic_*.py"]
