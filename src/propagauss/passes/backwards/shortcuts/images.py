"""Convolutions whose part of the covariance takes less time from their images than from the patches in them."""

from __future__ import annotations

from torch import fx, nn

from propagauss.passes.backwards.layers import behind, on_patches
from propagauss.rules.adjoints.forms import Form
from propagauss.rules.adjoints.positions import SharedLayer
from propagauss.rules.adjoints.shifts import LARGE, Geometry, ShiftedPairs
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


def _form(layer: SharedLayer, images: Geometry) -> Form | None:
    channels = layer.variance[0].numel() // len(images.shifts())
    if layer.pairs:
        worth = layer.variance.shape[0] * channels >= LARGE and images.worth_shifting()
        return ShiftedPairs(layer.independent, layer.full, images) if worth else None
    slides = images.kernel == (3, 3) and {*images.stride, *images.dilation} == {1}
    if slides and tiles_pay(*images.places, channels):
        return TiledConvolution(layer.independent, layer.full, list(images.padding))
    return None
