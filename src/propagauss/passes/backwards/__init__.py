"""The pass of the exact engine: sensitivities of the outputs go backwards through the traced graph."""
