"""Vision transformers and language models with random weights in their last blocks."""
