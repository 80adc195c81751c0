"""propagauss: the predictive distribution of a Bayesian neural network, analytically, in one forward pass."""

from propagauss.errors import InputError, PosteriorError, PropagaussError, UnsupportedOpError
from propagauss.gaussian import Gaussian
from propagauss.posterior import DiagonalPosterior, FullPosterior, KroneckerPosterior, Posterior, load_posterior
from propagauss.rules import rule
from propagauss.streamline import Streamlined, streamline
