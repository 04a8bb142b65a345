"""Stock torchrun on rdzv."""
