"""What `python -m pagedattn` says of a machine: gathered as plain data, then printed."""
