"""Functions of single entries: activations, arithmetic, comparisons; linearised, or by their moments."""
