"""The workers of one node under `rdzv run`: how many there are, what they are told, their output, and their end."""
