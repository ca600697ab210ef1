"""From a call's arguments to the backend that runs it."""
