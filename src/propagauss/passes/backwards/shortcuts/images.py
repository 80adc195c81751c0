"""Convolutions whose part of the covariance takes less time from their images than from the patches in them."""

from __future__ import annotations

from torch import fx, nn

from propagauss.passes.backwards.layers import behind, on_patches
from propagauss.rules.adjoints.forms import Form
from propagauss.rules.adjoints.images import convolution, settings
from propagauss.rules.adjoints.positions import SharedLayer
from propagauss.rules.adjoints.shifts import LARGE, Geometry, ShiftedPairs
from propagauss.rules.adjoints.tiled_adjoint import TiledAdjoint, tiled_adjoint_pays
from propagauss.rules.adjoints.tiles import TiledConvolution, tiles_pay


def read_images(graph: fx.Graph, root: nn.Module, geometries: dict[fx.Node, Geometry]) -> None:
    """Replace forms on patches; `geometries` has what is known of the nodes that make these."""
    for node in list(graph.nodes):
        layer = root.get_submodule(str(node.target)) if node.op == "call_module" else None
        if not isinstance(layer, SharedLayer) or layer.left is not None or node.args[1] not in geometries:
            continue
        g, patches, *total = node.args
        assert g.target is behind and patches.target is on_patches
        form = _form(layer, geometries[patches])
        if form is not None:
            root.set_submodule(str(node.target), form)
            node.args = (g.args[0], patches.args[0], *total)


def tile_adjoints(graph: fx.Graph, root: nn.Module, outputs: int) -> None:
    """Replace adjoints of convolutions with fixed weights and images."""
    for node in list(graph.nodes):
        if node.target is not convolution or node.args[1] != 0 or node.args[4].op != "get_attr":
            continue
        g, _, y, x, w, *rest = node.args
        if "val" not in x.meta or "val" not in y.meta:  # a parameter in place of images
            continue
        weight = root.get_buffer(str(w.target))
        sizes, places = (tuple(n.meta["val"].shape[2:]) for n in (x, y))
        if weight.shape[2:] != (3, 3) or (len(rest) > 4 and rest[4] != 1) or not _fixed(*sizes, *places):
            continue
        stride, padding, dilation = settings(weight, *rest)
        if {*stride, *dilation} == {1} and tiled_adjoint_pays(outputs, sizes, places, *weight.shape[:2]):
            name = f"back_{w.target}"
            root.add_module(name, TiledAdjoint(weight, sizes, places, tuple(padding)))
            with graph.inserting_before(node):
                node.replace_all_uses_with(graph.call_module(name, (g,)))
            graph.erase_node(node)


def _fixed(*sizes: object) -> bool:
    return all(isinstance(s, int) for s in sizes)


def _form(layer: SharedLayer, images: Geometry) -> Form | None:
    channels = layer.variance[0].numel() // len(images.shifts())
    if layer.pairs:
        worth = layer.variance.shape[0] * channels >= LARGE and images.worth_shifting()
        return ShiftedPairs(layer.independent, layer.full, images) if worth else None
    slides = images.kernel == (3, 3) and {*images.stride, *images.dilation} == {1}
    if slides and tiles_pay(images.places[0], images.places[1], channels):
        return TiledConvolution(layer.independent, layer.full, list(images.padding))
    return None
