"""From graph to graph: what has to be recognised, kept, joined and replaced so that Gaussians can flow through it."""
