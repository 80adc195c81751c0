"""What the paper says about outliers; it gives densities as figures and no numbers."""

FIGURES = {"mlp": "fig:mlp-ood", "vit": "fig:vit-ood"}
KERNEL_VARIANCE = 0.25  # of the kernel density estimator, section Evaluation metrics
HIGHEST = {"mlp": 7.5, "vit": 12.0}  # upper end of the density axis of the figures
