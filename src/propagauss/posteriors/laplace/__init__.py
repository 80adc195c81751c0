"""The Laplace approximation: curvature of a likelihood over a data set, and the evidence that chooses the prior."""
