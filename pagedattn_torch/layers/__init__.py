"""The classes that engines know: backends, metadata and layers, thin over the functions."""
