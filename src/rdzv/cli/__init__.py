"""The command `rdzv`. Typer and rich are imported here and nowhere else. May import every package but torchrun and testing."""
