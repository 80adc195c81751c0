"""From the Gaussian at the output to a predictive distribution: likelihoods, links, calibration, metrics, export."""
