"""The 784-128-64-C networks on MNIST and its kin: scores, moments, rotations, and how good the approximations are."""
