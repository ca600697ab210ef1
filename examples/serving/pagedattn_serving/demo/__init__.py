"""The demo: its prompts, a live display, and a report that judges what was served."""
