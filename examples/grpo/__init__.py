"""What examples/rollout.py trains with: a policy whose arrays the engine reads, and its loss."""
