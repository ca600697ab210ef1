"""The classes that engines know: backends, metadata and layers of attention, on one core."""
