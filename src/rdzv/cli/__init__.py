"""The shell tools. Typer and rich are imported here and nowhere else."""
