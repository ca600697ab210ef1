"""Serving a model with the library: engine, scheduler, caches and model families."""
