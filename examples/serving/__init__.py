"""A served model: engine, scheduler, caches and model families on the library."""
