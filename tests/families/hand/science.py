"""Networks for science: neural operators, implicit representations, splines, unrolled solvers, equivariance."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from families.family import Built
from families.hand.register import BATCH, Lambda, Register, mlp, vectors

FAMILIES = Register("science")


class Spectral(nn.Module):
    """Fourier layer: multiply the lowest modes by complex weights, in one or two dimensions."""

    def __init__(self, width: int, modes: int, dimensions: int):
        super().__init__()
        size = (width, width, *[modes] * dimensions, 2)
        self.weight, self.modes, self.dimensions = nn.Parameter(torch.randn(size) / width), modes, dimensions

    def forward(self, x: Tensor) -> Tensor:
        w, m = torch.view_as_complex(self.weight), self.modes
        if self.dimensions == 1:
            f = torch.fft.rfft(x)
            low = torch.einsum("bim,iom->bom", f[..., :m], w)
            return torch.fft.irfft(F.pad(low, (0, f.shape[-1] - m)), n=x.shape[-1])
        f = torch.fft.rfft2(x)
        out = torch.zeros_like(f)
        out[..., :m, :m] = torch.einsum("bimn,iomn->bomn", f[..., :m, :m], w)
        return torch.fft.irfft2(out, s=x.shape[-2:])


def _operator(dimensions: int) -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        x = self.lift(x)
        for spectral, local in zip(self.spectral, self.local, strict=True):
            x = F.gelu(spectral(x) + local(x))
        return self.project(x)

    conv = nn.Conv1d if dimensions == 1 else nn.Conv2d
    spectral = nn.ModuleList(Spectral(8, 3, dimensions) for _ in range(2))
    local = nn.ModuleList(conv(8, 8, 1) for _ in range(2))
    model = Lambda(forward, lift=conv(2, 8, 1), spectral=spectral, local=local, project=conv(8, 1, 1))
    return model, (vectors(2, *[8] * dimensions),)


FAMILIES("Fourier neural operator, 1-d")(lambda: _operator(1))
FAMILIES("Fourier neural operator, 2-d")(lambda: _operator(2))


@FAMILIES("Fourier operator by a real transform (DCT matrix)")
def real_operator() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        low = torch.einsum("bit,tm->bim", self.lift(x), self.basis)
        return self.project(F.gelu(torch.einsum("bim,iom,tm->bot", low, self.weight, self.basis)))

    model = Lambda(
        forward, lift=nn.Conv1d(2, 8, 1), weight=nn.Parameter(torch.randn(8, 8, 3) / 8), project=nn.Conv1d(8, 1, 1)
    )
    t = torch.arange(8.0)
    model.register_buffer("basis", torch.cos(torch.pi * (t[:, None] + 0.5) * torch.arange(3.0) / 8) / 2)
    return model, (vectors(2, 8),)


@FAMILIES("DeepONet")
def deeponet() -> Built:
    def forward(self: nn.Module, u: Tensor, y: Tensor) -> Tensor:
        return torch.einsum("bp,bqp->bq", self.branch(u), self.trunk(y)) + self.bias

    parts = {"branch": mlp(10, 16, 8), "trunk": mlp(2, 16, 8, activation=nn.Tanh), "bias": nn.Parameter(torch.zeros(1))}
    return Lambda(forward, **parts), (vectors(10), vectors(5, 2))


@FAMILIES("SIREN")
def siren() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sin(10.0 * layer(x))
        return self.head(x)

    layers = nn.ModuleList([nn.Linear(2, 16), nn.Linear(16, 16)])
    return Lambda(forward, layers=layers, head=nn.Linear(16, 3)), (vectors(2),)


@FAMILIES("NeRF")
def nerf() -> Built:
    """Colours along a ray, weighted by what light gets through: exp and cumprod."""

    def forward(self: nn.Module, place: Tensor) -> Tensor:
        waves = place[..., None] * 2.0 ** torch.arange(3)
        features = torch.cat([waves.sin(), waves.cos()], -1).flatten(-2)
        out = self.mlp(features)
        alpha = 1 - torch.exp(-F.softplus(out[..., 3]) * 0.3)
        through = torch.cumprod(1 - alpha + 1e-6, -1)
        through = torch.cat([torch.ones_like(through[..., :1]), through[..., :-1]], -1)
        return ((alpha * through)[..., None] * out[..., :3].sigmoid()).sum(-2)

    return Lambda(forward, mlp=mlp(18, 16, 16, 4)), (vectors(6, 3),)


@FAMILIES("Fourier features")
def fourier_features() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        z = x @ self.b
        return self.mlp(torch.cat([z.sin(), z.cos()], -1))

    model = Lambda(forward, mlp=mlp(16, 16, 2))
    model.register_buffer("b", torch.randn(2, 8))
    return model, (vectors(2),)


@FAMILIES("hash-grid encoding (Instant-NGP)")
def hash_grid() -> Built:
    """A learned table at the corners of a cell, interpolated."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        place = x.sigmoid() * 6
        low = place.floor()
        part, index = place - low, low.long()
        total = 0.0
        for i in (0, 1):
            for j in (0, 1):
                key = ((index[:, 0] + i) ^ ((index[:, 1] + j) * 2654435761)) % 32
                weight = (part[:, 0] if i else 1 - part[:, 0]) * (part[:, 1] if j else 1 - part[:, 1])
                total = total + weight[:, None] * self.table(key)
        return self.mlp(total)

    return Lambda(forward, table=nn.Embedding(32, 4), mlp=mlp(4, 16, 2)), (vectors(2),)


def _ode(method: str) -> Built:
    def forward(self: nn.Module, y: Tensor) -> Tensor:
        f, h = self.field, 0.25
        for _ in range(4):
            if method == "euler":
                y = y + h * f(y)
                continue
            k1 = f(y)
            k2 = f(y + h / 2 * k1)
            k3 = f(y + h / 2 * k2)
            y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + f(y + h * k3))
        return self.head(y)

    return Lambda(forward, field=mlp(4, 16, 4, activation=nn.Tanh), head=nn.Linear(4, 2)), (vectors(4),)


FAMILIES("neural ODE, Euler")(lambda: _ode("euler"))
FAMILIES("neural ODE, Runge-Kutta")(lambda: _ode("rk4"))


@FAMILIES("physics-informed network")
def pinn() -> Built:
    def forward(self: nn.Module, t: Tensor, x: Tensor) -> Tensor:
        return self.mlp(torch.cat([t, x], -1)) * (1 - x**2) + torch.sin(torch.pi * x)

    return Lambda(forward, mlp=mlp(2, 16, 16, 16, 1, activation=nn.Tanh)), (vectors(1), vectors(1))


@FAMILIES("Hamiltonian network, written out")
def hamiltonian() -> Built:
    """dH/dq and dH/dp of a perceptron with one hidden layer, by hand."""

    def forward(self: nn.Module, z: Tensor) -> Tensor:
        slope = (1 - torch.tanh(self.first(z)) ** 2) * self.second.weight
        gradient = slope @ self.first.weight
        q, p = gradient.chunk(2, -1)
        return torch.cat([p, -q], -1)

    return Lambda(forward, first=nn.Linear(4, 16), second=nn.Linear(16, 1, bias=False)), (vectors(4),)


@FAMILIES("input-convex network")
def convex() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        z = F.softplus(self.first(x))
        z = F.softplus(F.linear(z, F.softplus(self.w1)) + self.skip1(x))
        return F.linear(z, self.w2.exp()) + self.skip2(x)

    weights = {"w1": nn.Parameter(torch.randn(8, 8)), "w2": nn.Parameter(torch.randn(1, 8))}
    parts = {"first": nn.Linear(4, 8), "skip1": nn.Linear(4, 8), "skip2": nn.Linear(4, 1)}
    return Lambda(forward, **weights, **parts), (vectors(4),)


@FAMILIES("deep equilibrium, unrolled")
def equilibrium() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        z = torch.zeros_like(self.inject(x))
        for _ in range(8):
            z = torch.tanh(self.weight(z) * 0.5 + self.inject(x))
        return self.head(z)

    return Lambda(forward, inject=nn.Linear(4, 8), weight=nn.Linear(8, 8), head=nn.Linear(8, 2)), (vectors(4),)


@FAMILIES("group-equivariant convolution (C4)")
def c4() -> Built:
    """One kernel in four rotations, pooled over the group."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        kernels = torch.cat([torch.rot90(self.kernel, i, (-2, -1)) for i in range(4)])
        h = F.conv2d(x, kernels, padding=1).unflatten(1, (4, -1)).relu().amax(1)
        return self.head(h.mean((-2, -1)))

    return Lambda(forward, kernel=nn.Parameter(torch.randn(6, 2, 3, 3) / 4), head=nn.Linear(6, 2)), (vectors(2, 8, 8),)


@FAMILIES("vector neurons")
def vector_neurons() -> Built:
    """Rotation-equivariant layers on three-vectors, with a projected ReLU."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        q, d = (torch.einsum("bnc,oc->bno", x, w) for w in (self.w, self.direction))
        dot, square = (q * d).sum(1, keepdim=True), (d * d).sum(1, keepdim=True)
        h = torch.where(dot >= 0, q, q - dot / (square + 1e-6) * d)
        return self.head(h.norm(dim=1))

    weights = {"w": nn.Parameter(torch.randn(6, 4)), "direction": nn.Parameter(torch.randn(6, 4))}
    return Lambda(forward, **weights, head=nn.Linear(6, 2)), (vectors(3, 4),)


@FAMILIES("complex-valued network")
def complex_valued() -> Built:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        z = torch.complex(self.real(x), self.imaginary(x))
        z = z * torch.polar(torch.ones_like(self.phase), self.phase)
        return self.head(z.abs())

    parts = {"real": nn.Linear(4, 8), "imaginary": nn.Linear(4, 8), "phase": nn.Parameter(torch.randn(8))}
    return Lambda(forward, **parts, head=nn.Linear(8, 2)), (vectors(4),)


@FAMILIES("state-space model (S4D), by convolution")
def s4d() -> Built:
    def forward(self: nn.Module, u: Tensor) -> Tensor:
        n = u.shape[-1]
        a = torch.complex(-self.decay.exp(), self.frequency)
        kernel = (
            2 * torch.einsum("hs,hst->ht", torch.view_as_complex(self.c), (a[..., None] * torch.arange(n)).exp())
        ).real
        y = torch.fft.irfft(torch.fft.rfft(u, n=2 * n) * torch.fft.rfft(kernel, n=2 * n), n=2 * n)[..., :n]
        return self.head(F.gelu(y + u * self.d[:, None]).mean(-1))

    weights = {
        "decay": nn.Parameter(torch.randn(4, 3)),
        "frequency": nn.Parameter(torch.randn(4, 3)),
        "c": nn.Parameter(torch.randn(4, 3, 2)),
        "d": nn.Parameter(torch.randn(4)),
    }
    return Lambda(forward, **weights, head=nn.Linear(4, 2)), (torch.randn(BATCH, 4, 8),)
