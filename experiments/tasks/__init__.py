"""What uncertainty is for: outliers, and sensitivity maps."""
