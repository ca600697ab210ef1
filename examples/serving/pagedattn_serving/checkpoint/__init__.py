"""Checkpoints as Hugging Face stores them: configs, weights, tokenizers."""
