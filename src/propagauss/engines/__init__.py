"""The two ways to a predictive Gaussian; `streamline` carries variances forwards through a rewritten model."""
