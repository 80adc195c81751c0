"""What may be wrong in calls that make or use networks and predictors."""

# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import propagauss as pg
from arguments.given import EYE, NAN, TARGETS, Row, Then, V, X, Y, adder, broken, drawn, nested

ROWS: list[Row] = []
add = adder(ROWS)

add(
    "streamline",
    ("text as the example", lambda t: pg.streamline(t.model, t.posterior, "x"), "no tensor.*but 'x'.*loader"),
    ("a loader", lambda t: pg.streamline(t.model, t.posterior, DataLoader([1])), "no tensor.*a DataLoader"),
    ("nested", lambda t: pg.streamline(t.model, t.posterior, nested()), "input 0 of the example is a nested"),
    ("MKL-DNN", lambda t: pg.streamline(t.model, t.posterior, X.to_mkldnn()), "input 0 of the example is an MKL"),
    ("a dictionary", lambda t: pg.streamline(t.model, {"a": V}, X), "posterior is a dict.*DiagonalPosterior"),
    ("a path", lambda t: pg.streamline(t.model, "p.safetensors", X), "posterior is 'p.saf.*load_posterior"),
    ("swapped", lambda t: pg.streamline(t.posterior, t.model, X), "nn.Module, but is a DiagonalPosterior"),
    ("check", lambda t: pg.streamline(t.model, t.posterior, X, check="yes"), "check is 'yes'.*True or False"),
    ("twice", lambda t: pg.streamline(t.net, None, X), "rewritten already"),
    ("a generator", lambda t: pg.streamline(Then(drawn), None, X), "uses a Generator for aten.randn.* as an input"),
    ("output", lambda t: pg.streamline(t.model, t.posterior, X, output="a"), "returns a tensor, which has no 'a'"),
    ("integers", lambda t: pg.streamline(t.model, t.posterior, Y), r"example: .*int64.*holds integers.*\.float\(\)"),
    ("width", lambda t: pg.streamline(t.model, t.posterior, X[:, :2]), r"example: .*not run on .*\(4, 2\)"),
    ("a number", lambda t: pg.streamline(t.model, t.posterior, X[0, 0]), r"no tensor with a batch.*\[batch"),
    ("a classifier", lambda t: pg.streamline(t.classifier, None, X), "rewritten already"),
)
add(
    "linearise",
    ("complex", lambda t: pg.linearise(t.model, t.posterior, X.to(torch.complex64)), "does not run on.*complex64"),
    ("outputs", lambda t: pg.linearise(t.model, t.posterior, X, outputs="all"), "outputs is 'all'"),
    ("outputs zero", lambda t: pg.linearise(t.model, t.posterior, X, outputs=0), "outputs is 0.*at least 1"),
    ("outputs flag", lambda t: pg.linearise(t.model, t.posterior, X, outputs=True), "outputs is True"),
    ("outputs none", lambda t: pg.linearise(t.model, t.posterior, X, outputs=[]), "outputs is an empty list"),
    ("outputs text", lambda t: pg.linearise(t.model, t.posterior, X, outputs=["a"]), "outputs holds 'a'"),
    ("outputs tensor", lambda t: pg.linearise(t.model, t.posterior, X, outputs=Y), r"a tensor of shape \(4,\)"),
    ("outputs beyond", lambda t: pg.linearise(t.model, t.posterior, X, outputs=[99]), "holds 99.* from 0 to 1"),
    ("posterior", lambda t: pg.linearise(t.model, {"a": V}, X), "posterior is a dict.*DiagonalPosterior"),
    ("twice", lambda t: pg.linearise(t.net, None, X), "rewritten already"),
    ("complex output", lambda t: pg.linearise(Then(torch.fft.fft), None, X), "complex numbers.*view_as_real"),
    ("sparse output", lambda t: pg.linearise(Then(Tensor.to_sparse), None, X), r"sparse tensor.*\.to_dense"),
    ("random", lambda t: pg.linearise(Then(lambda h: h + torch.randn(2)), None, X), "draws random numbers"),
    ("a generator", lambda t: pg.linearise(Then(drawn), None, X), "uses a Generator for aten.randn.* as an input"),
)
add(
    "Streamlined",
    ("two inputs", lambda t: t.net(X, X), "for 1 positional input, but was called with 2 positional inputs"),
    ("a name", lambda t: t.net(y=X), "for 1 positional input, but was called with y="),
    ("a list", lambda t: t.net(X.tolist()), "called with 4 positional|nested"),
)
add("Plan", ("unknown", lambda t: pg.streamline(t.model, None, X, output=3).plan, "output is 3; the name of a field"))
add(
    "Classifier",
    ("a posterior", lambda t: pg.Classifier(t.posterior), "map inputs to a Gaussian, but is a Diag"),
    ("a model", lambda t: pg.Classifier(t.model)(X), "net returned a tensor.*pg.streamline"),
    ("a latent", lambda t: t.classifier.log_probs_of(X), "returned a tensor.*a Gaussian is needed"),
    ("many samples", lambda t: pg.Classifier(t.net, samples=10**9), "at most 1,048,576"),
    ("1e30", lambda t: t.classifier(X * 1e30), "not finite.*rescale"),
    ("weights", lambda t: pg.Classifier(pg.streamline(broken(), t.posterior, X))(X), "weights that are not finite"),
    ("export None", lambda t: t.classifier.export(None), "path to export to is None.*name of a file"),
    ("export suffix", lambda t: t.classifier.export("m.txt"), r"'m.txt'.*\.pt2 or \.onnx"),
    ("export folder", lambda t: t.classifier.export(t.folder / "folder.pt2"), "is a folder"),
    ("export nowhere", lambda t: t.classifier.export(t.folder / "no" / "m.pt2"), "there is no folder .*make it"),
    ("export a long name", lambda t: t.classifier.export(t.folder / ("a" * 300 + ".pt2")), "cannot write .*too long"),
    ("predict a scalar", lambda t: t.classifier.predict(np.float32(3)), "no tensor with a batch dimension"),
    ("predict masked", lambda t: t.classifier.predict(np.ma.masked_less(X.numpy(), 0)), "masked.*fill or remove"),
    ("predict a table", lambda t: t.classifier.predict(pa.array([1.0])), r"a DoubleArray: .*\.to_numpy\(\)"),
    ("no labels", lambda t: pg.Classifier(t.net).calibrate([(X, Y * 0 - 100)], progress=False), "labels are -100"),
    ("export flag", lambda t: t.classifier.export(t.folder / "m.pt2", covariance="full"), "covariance is 'full'"),
)
add(
    "BinaryClassifier",
    ("link", lambda t: pg.BinaryClassifier(t.net, "mean_field"), "no link 'mean_field'.*probit, quadrature"),
    ("a model", lambda t: pg.BinaryClassifier(t.model)(X), "net returned a tensor.*pg.streamline"),
    ("labels", lambda t: pg.BinaryClassifier(t.net).fit_scale([(X, 2 * TARGETS)]), "labels of 0 and 1"),
)
add(
    "HeteroscedasticRegressor",
    ("a model", lambda t: pg.HeteroscedasticRegressor(t.model)(X), "net returned a tensor.*pg.streamline"),
    ("shape", lambda t: pg.HeteroscedasticRegressor(lambda x: pg.Gaussian(x, x**2))(X), r"needs outputs \[\.\.\., 2\]"),
)
add(
    "Regressor",
    ("noise text", lambda t: pg.Regressor(t.net, noise="a"), "noise is 'a'; it must be a standard deviation"),
    ("noise negative", lambda t: pg.Regressor(t.net, noise=[0.1, -1]), r"noise is \[0.1, -1.0\].*none negative"),
    ("noise NaN", lambda t: pg.Regressor(t.net, noise=NAN), "noise is nan"),
    ("noise complex", lambda t: pg.Regressor(t.net, noise=1j), "noise is 1j"),
    ("noise flag", lambda t: pg.Regressor(t.net, noise=True), "noise is True"),
    ("noise matrix", lambda t: pg.Regressor(t.net, noise=EYE), r"noise is a tensor of shape \(2, 2\)"),
    ("noise none", lambda t: pg.Regressor(t.net, noise=[]), "noise is a list of 0"),
    ("noise meta", lambda t: pg.Regressor(t.net, noise=V.to("meta")), "noise is on the meta device"),
    ("noises", lambda t: pg.Regressor(t.net, noise=torch.ones(3))(X), "3 noise levels"),
    ("fit_noise", lambda t: pg.Regressor(t.net).fit_scale([(X, TARGETS)], fit_noise="a"), "fit_noise is 'a'"),
    ("1e30", lambda t: t.regressor(X * 1e30), "not finite.*rescale"),
    ("NaN", lambda t: t.regressor(X * NAN), "input itself has 12 values that are not finite"),
)
add(
    "load",
    ("None", lambda t: pg.load(None), "path to load from is None"),
    ("a folder", lambda t: pg.load(t.folder), "is not a file"),
    ("missing", lambda t: pg.load(t.folder / "no.pt2"), "there is no file"),
    ("another kind", lambda t: pg.load(t.folder / "junk.safetensors"), "cannot be read as a model.*export or copy"),
)
add(
    "Predictions",
    ("level", lambda t: t.regressor.predict(X, progress=False).interval(95), "level is 95.*between 0 and 1"),
    ("count", lambda t: t.classifier.predict(X, progress=False).acquire(9), "count is 9.*at most 4"),
    ("by", lambda t: t.classifier.predict(X, progress=False).acquire(1, "variance"), "by is 'variance'; it must be '"),
)
add(
    "Gaussian",
    ("a list", lambda t: pg.Gaussian(X, [1.0]), "variance of a Gaussian is a list of 1.*as_tensor"),
    ("a number", lambda t: pg.Gaussian(X, 1.0), "variance of a Gaussian is 1.0.*as_tensor"),
    ("complex", lambda t: pg.Gaussian(X + 0j, X + 0j), "floating-point mean, got torch.complex64"),
    ("shape", lambda t: pg.Gaussian(X, X[:2].square()), "they must agree"),
    ("neither", lambda t: pg.Gaussian(X), "either variance= .* or covariance="),
    ("sample", lambda t: pg.Gaussian(X, X.square()).sample(5), r"shape of a sample is 5.*\(10,\)"),
    ("scale", lambda t: pg.Gaussian(X, X.square()).scale("a"), "factor of a covariance is 'a'"),
    ("scales", lambda t: pg.Gaussian(X, X.square()).scale(torch.ones(7)), "must be a single number"),
    ("generator", lambda t: pg.Gaussian(X, X.square()).sample((2,), generator=0), "generator is 0; give torch.Gen"),
    ("to", lambda t: pg.Gaussian(X, X.square()).to(torch.int64), "torch.int64; floating-point"),
)
add(
    "rule",
    ("nothing", lambda t: pg.rule(), r"names no op.*@pg.rule\("),
    ("bare", lambda t: pg.rule(lambda x: x), "takes ops as they stand in a graph.*got a function"),
    ("a function", lambda t: pg.rule(torch.relu), "takes ops as they stand"),
    ("a name", lambda t: pg.rule("relu"), "takes ops as they stand.*got 'relu'"),
    ("None", lambda t: pg.rule(None), "takes ops as they stand.*got None"),
    ("no function", lambda t: pg.rule(torch.ops.aten.cosh.default)(5), "a rule is a function"),
)
add(
    "Classifier.calibrate",
    ("tolerance", lambda t: pg.Classifier(t.net).calibrate([(X, Y)], tolerance=-1), "tolerance is -1.*not negative"),
    ("no loader", lambda t: pg.Classifier(t.net).calibrate(None), "the loader is None"),
    (
        "progress",
        lambda t: pg.Classifier(t.net).calibrate([(X, Y)], progress="bar"),
        "progress is 'bar'",
    ),
    ("temperature", lambda t: pg.Classifier(t.net, temperature=0), "temperature is 0.*positive"),
)
add(
    "tune",
    ("no model", lambda t: pg.tune(None, [(X, Y)], [(X, Y)]), "nn.Module, but is None"),
    ("likelihood", lambda t: pg.tune(t.model, [(X, Y)], [(X, Y)], "gamma"), "likelihood is 'gamma'"),
    ("budget", lambda t: pg.tune(t.model, [(X, Y)], [(X, Y)], budget="5"), "budget is '5'.*positive"),
    ("validation", lambda t: pg.tune(t.model, [(X, Y)], None), "the loader is None"),
    ("few points", lambda t: pg.tune(t.model, [(X, Y)], [(X, Y)]), "there are 4 validation points: give 10"),
)
