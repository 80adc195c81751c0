"""Windows that move over positions: convolution, pooling, sampling of grids."""
