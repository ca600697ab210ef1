"""The paged cache: its planes, its scales, and the checks of both."""
