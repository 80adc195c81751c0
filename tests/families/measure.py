"""What the survey asks of one family: does torch trace it, does it streamline and run, and are the numbers right?"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import propagauss as pg
from families.blocks import last_block
from families.family import Example, Family, Wanted, call, cloned, trained_size

VARIANCE = 1e-6  # of every random weight: small, so that first order is exact
PROBES = 16
OP = re.compile(r"^  (\S+) at '([^']*)' (.+)$", re.MULTILINE)

Say = Callable[[str, Any], None]  # hands on a field of the record as soon as it is known


def measure(family: Family, say: Say, quick: bool = False) -> None:
    """Fill in the record of a family, a field at a time, so that a time limit leaves what is known.

    `quick` takes it that what works with everything random works with the last block random.
    """
    torch.manual_seed(0)
    say("stage", "build")
    try:
        model, example, y = _built(family)
    except Exception as error:
        say("build", _text(error))
        return
    say("build", "ok")
    say("parameters", sum(p.numel() for p in model.parameters()))
    say("class", type(model.model).__name__)
    chosen = {"all": [n for n, _ in model.named_parameters()], "last": last_block(model, example)}
    found: dict[str, dict[str, Any]] = {}
    for which, names in chosen.items():
        say("stage", which)
        if quick and found and found["all"]["status"] == "ok":
            found[which] = {"status": "ok", "inferred": True}
        else:
            found[which] = {"random": len(names), **streamlined(model, names, example, y)}
        say(which, found[which])
    say("stage", "export")
    traced = any(result["status"] != "refused" or result["ops"] for result in found.values())
    say("export", "ok" if traced else _export(model, example))
    for which, names in chosen.items():
        if found[which]["status"] in ("ok", "variance") and "inferred" not in found[which]:
            say("stage", f"truth_{which}")
            say(f"truth_{which}", _first_order(model, names, example))
    say("stage", "done")


def _built(family: Family) -> tuple[Wanted, Example, Tensor]:
    bare, example = family.build()
    model = Wanted(bare).eval()
    if family.initialise:
        trained_size(model)
    for p in model.parameters():
        p.requires_grad_(p.is_floating_point())
    with torch.no_grad():
        y = call(model, cloned(example))
        again = call(model, cloned(example))
    if not bool(torch.isfinite(y).any()):
        raise ValueError("the model's own output is not finite")
    if not torch.equal(torch.nan_to_num(y), torch.nan_to_num(again)):
        raise ValueError("the model's own output is random")
    return model, example, y


def _export(model: nn.Module, example: Example) -> str:
    """Whether `torch.export` itself, at fixed sizes, takes a model that was not even traced."""
    args, kwargs = ((), cloned(example)) if isinstance(example, dict) else (cloned(example), {})
    try:
        torch.export.export(model, args, kwargs, strict=False)
    except Exception as error:
        return _text(error)
    return "ok"


def streamlined(model: nn.Module, names: Sequence[str], example: Example, y: Tensor) -> dict[str, Any]:
    """Status `ok`, or where it went wrong: `refused`, `crash (streamline)`, `crash (run)`, `mean`, `variance`."""
    start = time.perf_counter()
    found: dict[str, Any] = {}
    values = dict(model.named_parameters())
    posterior = pg.DiagonalPosterior({n: torch.full_like(values[n], VARIANCE).detach() for n in names})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            net = pg.streamline(model, posterior, cloned(example))
    except pg.PropagaussError as error:
        return {"status": "refused", "error": _text(error), "ops": _ops(error)}
    except Exception as error:
        return {"status": "crash (streamline)", "error": _text(error), "where": _where(error)}
    found["streamline_seconds"] = round(time.perf_counter() - start, 2)
    try:
        with torch.no_grad():
            g = call(net, cloned(example))
    except Exception as error:
        return {"status": "crash (run)", "error": _text(error), "where": _where(error), **found}
    if isinstance(g, Tensor):
        return {"status": "variance", "error": "the output is a tensor: nothing random reaches it", **found}
    return {**_judged(g, y), **found}


def _judged(g: pg.Gaussian, y: Tensor) -> dict[str, Any]:
    if g.mean.shape != y.shape:
        return {"status": "mean", "error": f"shape {tuple(g.mean.shape)}, not {tuple(y.shape)}"}
    real = y.abs() < 1e30  # masked outputs are the smallest number there is
    size = float(y[real].square().mean().sqrt())
    if not torch.allclose(g.mean, y.to(g.mean.dtype), rtol=1e-4, atol=1e-4 * size, equal_nan=True):
        gap = float((g.mean - y)[real].square().mean().sqrt()) / size
        return {"status": "mean", "error": f"relative distance {gap:.1e}"}
    v = g.variance
    if not bool(v.isfinite().all()):
        return {"status": "variance", "error": f"{int((~v.isfinite()).sum())} of {v.numel()} are not finite"}
    if bool((v < 0).any()):
        return {"status": "variance", "error": f"{int((v < 0).sum())} of {v.numel()} are negative"}
    sd = float(v[real].mean().sqrt()) / VARIANCE**0.5
    if not bool((v > 0).any()):
        return {"status": "variance", "error": "all zero", "sd": sd}
    return {"status": "ok", "sd": sd, "zeros": round(float((v == 0).float().mean()), 3)}


def _first_order(model: nn.Module, names: Sequence[str], example: Example) -> float | str:
    """Root mean square of the true first-order sd over outputs, per sd of a weight.

    tr(J Σ Jᵀ) = E |Σ^½ Jᵀ u|² for random signs u, by reverse mode, which every op of a trainable model has. Right to
    about 1 / √PROBES; a `detach` in the model stops it.
    """
    chosen = [p for n, p in model.named_parameters() if n in set(names)]
    try:
        y = call(model, cloned(example))
        real = y.abs() < 1e30
        total = 0.0
        for _ in range(PROBES):
            u = torch.where(real, torch.randint_like(y, 2) * 2 - 1, 0.0)
            slopes = torch.autograd.grad(y, chosen, u, retain_graph=True, allow_unused=True)
            total += sum(float(s.double().square().sum()) for s in slopes if s is not None)
        return (total / PROBES / int(real.sum())) ** 0.5
    except Exception as error:
        return _text(error)


def _ops(error: Exception) -> list[tuple[str, str, str]]:
    """Op, module path and reason, of each line of an `UnsupportedOpError`."""
    return [m.groups() for m in OP.finditer(str(error))] if isinstance(error, pg.UnsupportedOpError) else []


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:1500]


def _where(error: Exception) -> str:
    """The innermost line of the library, and the innermost line of all."""
    frames = []
    step = error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        frames.append(
            (code.co_filename, f"{'/'.join(code.co_filename.split('/')[-2:])}:{step.tb_lineno} {code.co_name}")
        )
        step = step.tb_next
    ours = [text for file, text in frames if "propagauss" in file]
    return " < ".join(dict.fromkeys([frames[-1][1], *ours[-2:][::-1]]))
