"""Literal references: the sums of the paper as loops, and Monte Carlo. Slow, obvious, independent of the library."""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def random_psd(
    n: int, batch: int | None = None, scale: float = 1.0, generator: torch.Generator | None = None
) -> Tensor:
    """A well-conditioned random covariance: `[n, n]` or `[batch, n, n]`."""
    shape = (n, n) if batch is None else (batch, n, n)
    root = torch.randn(shape, dtype=torch.float64, generator=generator)
    return scale * (root @ root.mT / n + 0.1 * torch.eye(n, dtype=torch.float64))


def linearised(function: Callable[..., Tensor], means: Sequence[Tensor], covariances: Sequence[Tensor]) -> Tensor:
    """`C_kl = Σ_inputs Σ_ij J_ki C_ij J_lj`, sample by sample, entry by entry: `[B, n', n']`."""
    samples = []
    for b in range(means[0].shape[0]):
        at = tuple(m[b : b + 1] for m in means)
        jacobians = torch.autograd.functional.jacobian(lambda *xs: function(*xs).flatten(), at)
        out = jacobians[0].shape[0]
        total = [[0.0] * out for _ in range(out)]
        for jacobian, covariance in zip(jacobians, covariances, strict=True):
            j, c = jacobian.reshape(out, -1).tolist(), covariance[b].tolist()  # plain numbers: many times faster
            for k, l in itertools.product(range(out), repeat=2):
                total[k][l] += sum(j[k][i] * c[i][n] * j[l][n] for i, n in itertools.product(range(len(c)), repeat=2))
        samples.append(torch.tensor(total, dtype=torch.float64).reshape(out, out))
    return torch.stack(samples)


def linear_layer(weight: Tensor, joint: Tensor, m: Tensor, c: Tensor, has_bias: bool) -> Tensor:
    """The paper's Cov[h_k, h_l] for one sample, as written there.

    `weight [out, in]`, `joint` the dense covariance of (weight row by row, bias), `m [in]`, `c [in, in]`.
    """
    out, inputs = weight.shape
    w, s, a, v = weight.tolist(), joint.tolist(), m.tolist(), c.tolist()

    def at(k: int, i: int) -> int:
        return k * inputs + i

    result = torch.zeros(out, out, dtype=torch.float64)
    for k, l in itertools.product(range(out), repeat=2):
        total = 0.0
        for i, j in itertools.product(range(inputs), repeat=2):
            cov_w = s[at(k, i)][at(l, j)]
            total += a[i] * a[j] * cov_w + w[k][i] * w[l][j] * v[i][j] + v[i][j] * cov_w
        if has_bias:
            total += s[out * inputs + k][out * inputs + l]
            for i in range(inputs):
                total += a[i] * (s[at(k, i)][out * inputs + l] + s[at(l, i)][out * inputs + k])
        result[k, l] = total
    return result


def monte_carlo(
    function: Callable[..., Tensor], means: Sequence[Tensor], covariances: Sequence[Tensor], samples: int
) -> tuple[Tensor, Tensor]:
    """Mean and covariance of `function` under Gaussian inputs: `[B, n']`, `[B, n', n']`."""
    generator = torch.Generator().manual_seed(0)
    draws = []
    for m, c in zip(means, covariances, strict=True):
        root = torch.linalg.cholesky(c + 1e-14 * torch.eye(c.shape[-1], dtype=c.dtype))
        z = torch.randn((samples, m.shape[0], c.shape[-1]), dtype=m.dtype, generator=generator)
        draws.append(m + torch.einsum("bij,sbj->sbi", root, z).reshape(samples, *m.shape))
    values = function(*(d.flatten(0, 1) for d in draws)).reshape(samples, means[0].shape[0], -1)
    centred = values - values.mean(0)
    return values.mean(0), torch.einsum("sbi,sbj->bij", centred, centred) / samples


def assert_covariance_close(actual: Tensor, sampled: Tensor, samples: int, slack: float = 0.0) -> None:
    """Every entry within 6 standard errors of the sampled covariance (plus a relative `slack`).

    For Gaussians the standard error of a sampled `C_ij` is `√((C_ii C_jj + C_ij²) / samples)`; the outputs here are
    not quite Gaussian, so it is doubled.
    """
    d = actual.diagonal(dim1=-2, dim2=-1)
    size = d.unsqueeze(-1) * d.unsqueeze(-2)
    error = 2 * torch.sqrt((size + actual.square()) / samples)
    excess = (actual - sampled).abs() - 6 * error - slack * size.sqrt() - 1e-12
    assert (excess <= 0).all(), f"off by {excess.max():.3g} beyond the tolerance"


def shared_layer(weight: Tensor, joint: Tensor, m: Tensor, c: Tensor, has_bias: bool) -> Tensor:
    """`linear_layer` for positions that share the layer: Cov[h_tk, h_ul], one sample, as `[T*out, T*out]`.

    `m [T, in]`, `c [T, in, T, in]`, both rows and columns of the result run over (position, output).
    """
    (out, inputs), positions = weight.shape, m.shape[0]
    w, s, a, c = weight.tolist(), joint.tolist(), m.tolist(), c.tolist()  # plain numbers: many times faster in loops

    def at(k: int, i: int) -> int:
        return k * inputs + i

    result = torch.zeros(positions, out, positions, out, dtype=torch.float64)
    for t, k, u, l in itertools.product(range(positions), range(out), range(positions), range(out)):
        total = 0.0
        for i, j in itertools.product(range(inputs), repeat=2):
            cov_a, cov_w = c[t][i][u][j], s[at(k, i)][at(l, j)]
            total += a[t][i] * a[u][j] * cov_w + w[k][i] * w[l][j] * cov_a + cov_a * cov_w
        if has_bias:
            total += s[out * inputs + k][out * inputs + l]
            for i in range(inputs):
                total += a[t][i] * s[at(k, i)][out * inputs + l] + a[u][i] * s[at(l, i)][out * inputs + k]
        result[t, k, u, l] = total
    return result.reshape(positions * out, positions * out)


def bilinear(
    function: Callable[[Tensor, Tensor], Tensor], theta: Tensor, joint: Tensor, m: Tensor, c: Tensor, products: bool
) -> Tensor:
    """Covariance of `f(θ, x)` for independent Gaussians `θ ~ (theta, joint)` and `x ~ (m, c)`, all flat: `[n', n']`.

    With `f` linear in each argument, `δf_k = Σ_p J_kp δθ_p + Σ_i K_ki δx_i + Σ_pi H_kpi δθ_p δx_i`; the last sum has
    the covariance `Σ H_kpi H_lqj joint_pq c_ij`: exact. Without `products` that term is left out (linearisation).
    """
    by_theta = torch.func.jacrev(function, 0)(theta, m)
    by_x = torch.func.jacrev(function, 1)(theta, m)
    total = by_theta @ joint @ by_theta.mT + by_x @ c @ by_x.mT
    if products:
        mixed = torch.func.jacrev(torch.func.jacrev(function, 0), 1)(theta, m)  # [n', P, in]
        total = total + torch.einsum("kpi,lqj,pq,ij->kl", mixed, mixed, joint, c)
    return total


def convolution_terms(
    weight: Sequence[int],
    entry: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    groups: int = 1,
    transposed: bool = False,
    spare: Sequence[int] | None = None,
) -> list[list[tuple[int, int]]]:
    """A convolution as the dense matrix it is: for each output, which weight multiplies which input.

    All indices are flat. `weight` is the shape of the weight, `entry` that of the input `[C, *size]`, `padding` what is
    added before and after each axis, `spare` the output padding of a transposed convolution.
    """
    kernel, size = weight[2:], entry[1:]
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    if transposed:
        extra = spare or [0] * len(size)
        out = weight[1] * groups
        axes = zip(size, stride, padding, reach, extra, strict=True)
        result = [(n - 1) * s - sum(p) + r + e + 1 for n, s, p, r, e in axes]
    else:
        out = weight[0]
        axes = zip(size, stride, padding, reach, strict=True)
        result = [(n + sum(p) - r - 1) // s + 1 for n, s, p, r in axes]
    terms: list[list[tuple[int, int]]] = [[] for _ in range(out * torch.Size(result).numel())]
    inner, outer = entry[0] // groups, out // groups
    small, large = (size, result) if transposed else (result, size)
    for g, i, o in itertools.product(range(groups), range(inner), range(outer)):
        for place in itertools.product(*map(range, small)):
            for tap in itertools.product(*map(range, kernel)):
                shifts = zip(place, tap, stride, padding, dilation, strict=True)
                other = [p * s - b + t * d for p, t, s, (b, _), d in shifts]
                if any(not 0 <= x < n for x, n in zip(other, large, strict=True)):
                    continue
                there, here = (place, other) if transposed else (other, place)
                w = (g * inner + i, o, *tap) if transposed else (g * outer + o, i, *tap)
                at = _flat((g * outer + o, *here), (out, *result))
                terms[at].append((_flat(w, weight), _flat((g * inner + i, *there), entry)))
    return terms


def _flat(index: Sequence[int], shape: Sequence[int]) -> int:
    position = 0
    for i, n in zip(index, shape, strict=True):
        position = position * n + i
    return position


def convolution_layer(
    weight: Tensor, terms: list[list[tuple[int, int]]], joint: Tensor, m: Tensor, c: Tensor, channels: int | None
) -> Tensor:
    """The paper's Cov[h_k, h_l] with shared weights, one sample: `[n', n']`.

    `weight` and `m` are flat, `joint` is the dense covariance of (weight, bias); `channels` counts the output channels
    of a random bias, None without one.
    """
    size, start = len(terms), joint.shape[0] - (channels or 0)
    result = torch.zeros(size, size, dtype=torch.float64)
    values, mean, carried, cov = weight.tolist(), m.tolist(), c.tolist(), joint.tolist()  # plain numbers are faster
    for k, l in itertools.product(range(size), repeat=2):
        total = 0.0
        for (w, i), (u, j) in itertools.product(terms[k], terms[l]):
            cov_w = cov[w][u] if start else 0.0
            total += mean[i] * mean[j] * cov_w + values[w] * values[u] * carried[i][j] + carried[i][j] * cov_w
        if channels is not None:
            b_k, b_l = start + k * channels // size, start + l * channels // size
            total += cov[b_k][b_l]
            if start:
                total += sum(mean[i] * cov[w][b_l] for w, i in terms[k])
                total += sum(mean[j] * cov[u][b_k] for u, j in terms[l])
        result[k, l] = total
    return result
