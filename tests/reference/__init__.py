"""NumPy references of the engine's own ops, written to read like the formulas.

Arrays have NumPy order: the axes of a ggml tensor reversed, so that the memory is the same. Everything is computed in
float64 unless a function says otherwise.
"""
