"""What may be wrong in calls that make, read or use posteriors."""

# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import torch
from torch import nn

import propagauss as pg
from arguments.given import EYE, NAN, TARGETS, Row, Then, V, X, Y, adder, broken

ROWS: list[Row] = []
add = adder(ROWS)

add(
    "fit_laplace",
    ("no parameters", lambda t: pg.fit_laplace(t.model, [(X, Y)], parameters=[]), "empty list.*such as '0.weight'"),
    ("parameters None", lambda t: pg.fit_laplace(t.model, [(X, Y)], parameters=None), "parameters= holds None"),
    ("parameters", lambda t: pg.fit_laplace(t.model, [(X, Y)], parameters=[V]), "holds a tensor.*names or patterns"),
    ("distributed", lambda t: pg.fit_laplace(t.model, [(X, Y)], distributed="yes"), "distributed is 'yes'"),
    ("weights", lambda t: pg.fit_laplace(broken(), [(X, Y)]), "weights of '0.weight' are not: load"),
    ("1e30", lambda t: pg.fit_laplace(t.model, [(X * 1e30, Y)]), "not finite.*rescale"),
    ("NaN", lambda t: pg.fit_laplace(t.model, [(X * NAN, Y)]), "neither are its inputs: remove or impute"),
    ("complex", lambda t: pg.fit_laplace(nn.Linear(3, 2).to(torch.complex64), [(X, Y)]), "'weight' is torch.complex64"),
    ("complex output", lambda t: pg.fit_laplace(Then(lambda h: h + 1j), [(X, Y)]), "returns torch.complex64"),
    ("labels as output", lambda t: pg.fit_laplace(Then(lambda h: h.argmax(-1)), [(X, Y)]), "returns torch.int64"),
    ("no batch", lambda t: pg.fit_laplace(Then(lambda h: h.sum()), [(X, Y)]), r"needs outputs \[B, C\]"),
    ("an error", lambda t: pg.fit_laplace(Then(lambda h: 1 / 0), [(X, Y)]), "batch 0: .*ZeroDivisionError"),
    ("flags", lambda t: pg.fit_laplace(t.model, [(X, TARGETS > 0)], "regression"), r"torch.bool.*\.float\(\)"),
    ("swapped", lambda t: pg.fit_laplace([(X, Y)], t.model), "nn.Module, but is a list"),
)
add(
    "DiagonalPosterior",
    ("lists", lambda t: pg.DiagonalPosterior({"a": [1.0]}), "variance of 'a' is a list of 1.*as_tensor"),
    ("a number", lambda t: pg.DiagonalPosterior({"a": 1.0}), "variance of 'a' is 1.0.*as_tensor"),
    ("complex", lambda t: pg.DiagonalPosterior({"a": V + 1j}), r"'a' is torch.complex64.*\.real"),
    ("integers", lambda t: pg.DiagonalPosterior({"a": Y}), r"'a' is torch.int64.*\.float\(\)"),
    ("float8", lambda t: pg.DiagonalPosterior({"a": V.to(torch.float8_e5m2)}), r"float8.*\.float\(\)"),
    ("a list", lambda t: pg.DiagonalPosterior([V]), "variances are a list of 1; a dictionary"),
    ("a model", lambda t: pg.DiagonalPosterior(t.model), "variances are a Sequential; a dictionary"),
    ("names", lambda t: pg.DiagonalPosterior({1: V}), "the name 1; names of parameters are texts"),
)
add(
    "LowRankPosterior",
    ("None", lambda t: pg.LowRankPosterior(None, None), "variances are None; a dictionary"),
    ("a list", lambda t: pg.LowRankPosterior({"a": V}, [V]), "directions are a list of 1; a dictionary"),
)
add(
    "KroneckerPosterior",
    ("bare", lambda t: pg.KroneckerPosterior({"a": EYE}), r"factors of 'a' are a tensor.*give \(B, A\)"),
    ("None", lambda t: pg.KroneckerPosterior({"a": (EYE, None)}), "a Kronecker factor of 'a' is None"),
    ("three", lambda t: pg.KroneckerPosterior({"a": (EYE, EYE, EYE)}), "'a' has 3 Kronecker factors"),
    ("asymmetric", lambda t: pg.KroneckerPosterior({"a": (EYE.cumsum(1),)}), "'a' is not symmetric"),
    ("mixed", lambda t: pg.KroneckerPosterior({"a": (EYE, EYE.double())}), "mixed dtypes"),
    ("a list", lambda t: pg.KroneckerPosterior([EYE]), "factors are a list of 1; a dictionary"),
    ("precisions", lambda t: pg.KroneckerPosterior({"a": (EYE,)}, {"b": 1.0}), "has no entry for 'a'"),
)
add(
    "FullPosterior",
    ("complex", lambda t: pg.FullPosterior(["a"], EYE + 0j), r"complex64.*\.real"),
    ("NaN", lambda t: pg.FullPosterior(["a"], EYE * NAN), "not finite"),
    ("one name", lambda t: pg.FullPosterior("weight", EYE), "names is 'weight'; a list of names"),
    ("numbers", lambda t: pg.FullPosterior([5], EYE), "names is a list of 1; a list of names"),
    ("no names", lambda t: pg.FullPosterior([], EYE), "names no parameter"),
    ("shapes", lambda t: pg.FullPosterior(["a"], EYE, {"a": 2}), r"shape of 'a' is 2; sizes are needed"),
    ("other shapes", lambda t: pg.FullPosterior(["a"], EYE, {"b": (2,)}), "shapes has no entry for 'a'"),
)
add(
    "Posterior",
    ("select a number", lambda t: t.posterior.select(5), r"select\(\) holds 5.*such as '0.weight'"),
    ("select nothing", lambda t: t.posterior.select(), r"select\(\) is an empty list"),
    ("select none", lambda t: t.posterior.select([]), r"select\(\) is an empty list"),
    ("select bytes", lambda t: t.posterior.select(b"0.*"), r"select\(\) holds b'0.\*'"),
    ("select others", lambda t: t.posterior.select("1.*"), r"no parameter of the posterior matches '1.\*'"),
    ("variance", lambda t: t.posterior.variance("0.wieght"), "'0.wieght' is not .*did you mean '0.weight'"),
    ("covariance", lambda t: t.posterior.covariance(None), "None is not a parameter of this posterior"),
    ("bind", lambda t: t.posterior.bind(t.model), "parameters are a Sequential; a dictionary"),
    ("bind None", lambda t: t.posterior.bind(None), "parameters are None; a dictionary"),
    ("to", lambda t: t.posterior.to("float64"), r"cannot convert with to\('float64'\).*torch.float64"),
    ("to integers", lambda t: t.posterior.to(torch.int64), "torch.int64; floating-point"),
    ("to meta", lambda t: t.posterior.to("meta"), "meta device"),
    ("generator", lambda t: t.posterior.sample(2, generator=0), "generator is 0; give torch.Generator"),
    ("quadratic text", lambda t: t.posterior.quadratic(dict.fromkeys(t.posterior.names, "a")), "weight' is 'a'"),
    ("quadratic shape", lambda t: t.posterior.quadratic(dict.fromkeys(t.posterior.names, X)), r"\[B, C, \*shape\]"),
    ("save a long name", lambda t: t.posterior.save(t.folder / ("a" * 300)), "cannot write .*too long"),
    ("quadratic", lambda t: t.posterior.quadratic({}), "Jacobian of '0.weight' is missing"),
    ("save None", lambda t: t.posterior.save(None), "path of the posterior is None"),
    ("save nowhere", lambda t: t.posterior.save(t.folder / "no" / "p"), "there is no folder .*make it"),
    ("save folder", lambda t: t.posterior.save(t.folder), "is a folder: give the name of a file"),
    ("save a header", lambda t: pg.DiagonalPosterior({"__metadata__": V}).save(t.folder / "h"), "cannot hold: rename"),
    ("save empty", lambda t: t.posterior.save(""), "no name of a file"),
)
add(
    "load_posterior",
    ("None", lambda t: pg.load_posterior(None), "path of the posterior is None"),
    ("a number", lambda t: pg.load_posterior(5), "path of the posterior is 5"),
    ("bytes", lambda t: pg.load_posterior(b"x"), "path of the posterior is b'x'"),
    ("a posterior", lambda t: pg.load_posterior(t.posterior), "path of the posterior is a DiagonalPosterior"),
    ("a folder", lambda t: pg.load_posterior(t.folder), "is a folder"),
    ("long", lambda t: pg.load_posterior("a" * 300), "not a readable|no such file"),
    ("missing", lambda t: pg.load_posterior(t.folder / "no"), "no such file"),
    ("junk", lambda t: pg.load_posterior(t.folder / "junk.safetensors"), "not a readable safetensors"),
    ("device", lambda t: pg.load_posterior(t.folder / "no", "nope"), "device is 'nope', which cannot be used"),
)
add(
    "from_ivon",
    ("None", lambda t: pg.from_ivon(None, t.model), "reads the IVON optimiser.*NoneType"),
    ("SGD", lambda t: pg.from_ivon(torch.optim.SGD(t.model.parameters()), t.model), "reads the IVON.*SGD"),
)
add("from_laplace", ("None", lambda t: pg.from_laplace(None), "takes an object of laplace-torch"))
add(
    "from_swag",
    ("None", lambda t: pg.from_swag(None, t.model), "snapshots are None; a list of state dicts"),
    ("one", lambda t: pg.from_swag(t.snapshots[0], t.model), "snapshots are a dict of 4; a list"),
    ("models", lambda t: pg.from_swag([t.model], t.model), "entries of snapshot 0 are a Sequential"),
)
