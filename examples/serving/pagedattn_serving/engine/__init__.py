"""Continuous batching: scheduler, preemption, prefix cache, and the steps of the device."""
