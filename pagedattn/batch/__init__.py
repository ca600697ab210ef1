"""A step's batch: block tables, lengths, and which token is whose."""
