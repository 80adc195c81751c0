"""VaLLA's protocol: MNIST and Fashion-MNIST, each the other's outliers, with published numbers of other methods."""
