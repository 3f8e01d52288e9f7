"""Mutated GGUF files against everything that opens them: `python -m fuzz --seconds 60` in the folder above."""
