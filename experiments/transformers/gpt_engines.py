"""Both engines on prompts of many lengths: linearised networks are made once for each length."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from experiments.methods.classify import Batches, Predictor, Remembered, plain
from experiments.methods.engines import LINEARISED, STREAMLINED, forms
from propagauss.engines.linearise import linearise
from propagauss.engines.streamline import streamline
from propagauss.gaussian import Gaussian
from propagauss.posteriors import Posterior


class InDouble(nn.Module):
    """Logits in double precision: probabilities near one half must not become ties by rounding."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).double()


def engines(suffix: nn.Module, posterior: Posterior, held: Batches, test: Batches) -> list[Predictor]:
    """The plain model with and without a temperature, and each engine in all forms, for these batches."""
    net = streamline(suffix, posterior, held[0][0][:2])
    streamlined = forms(lambda x: net(x).to(torch.float64), STREAMLINED, "LA", held)
    latents = Remembered(EachLength(suffix, posterior))
    with torch.no_grad():
        for x, _ in sorted([*held, *test], key=lambda pair: pair[0].shape[1]):
            latents(x)
    return plain(InDouble(suffix).eval(), held) + streamlined + forms(latents, LINEARISED, "LA", held)


class EachLength:
    """A linearised network for the length of the batch; the last one is kept, so batches are best sorted by length."""

    def __init__(self, model: nn.Module, posterior: Posterior):
        self._model, self._posterior = model, posterior
        self._length, self._net = -1, None

    def __call__(self, x: Tensor) -> Gaussian:
        if self._net is None or x.shape[1] != self._length:
            self._net, self._length = linearise(self._model, self._posterior, x[:2]), x.shape[1]
        return self._net(x).to(torch.float64)
