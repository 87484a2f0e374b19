"""Prompts: their tokens, from tokenizers and from engines."""
