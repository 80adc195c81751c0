"""Facts about ops that have no rule of their own to state them with: they are followed by other means, or never reach
one, since they act on what is certain, or are replaced while the model is traced.
"""

from __future__ import annotations

from typing import Any

import torch

from propagauss.rules.facts import state

aten = torch.ops.aten


def _overloads(*names: str) -> list[Any]:
    packets = [getattr(aten, name) for name in names]
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads()]


# -- true or false

for _packet in (aten.gt, aten.ge, aten.lt, aten.le, aten.eq, aten.ne):
    state(_packet.Tensor, _packet.Scalar, compares=True)
state(aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default, combines=True)
state(aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_xor.Tensor, combines=True)
state(aten.__and__.Tensor, aten.__or__.Tensor, aten.__xor__.Tensor, combines=True, elementwise=True)
state(aten.logical_not.default, aten.bitwise_not.default, combines=True)

# -- elementwise, though PyTorch does not tag it so; those with a derivative in elementwise/slopes.py are stated there

state(aten.where.Scalar, elementwise=True)

# -- functions that PyTorch takes for constants: it gives them no gradient, and does not say so

state(
    *_overloads("special_airy_ai", "special_spherical_bessel_j0"),
    *_overloads("special_bessel_j0", "special_bessel_j1", "special_bessel_y0", "special_bessel_y1"),
    *_overloads(*(f"special_modified_bessel_{kind}" for kind in ("i0", "i1", "k0", "k1"))),
    *_overloads("special_scaled_modified_bessel_k0", "special_scaled_modified_bessel_k1"),
    *_overloads(*(f"special_chebyshev_polynomial_{kind}" for kind in "tuvw")),
    *_overloads(*(f"special_shifted_chebyshev_polynomial_{kind}" for kind in "tuvw")),
    *_overloads("special_hermite_polynomial_h", "special_hermite_polynomial_he"),
    *_overloads("special_laguerre_polynomial_l", "special_legendre_polynomial_p"),
    no_gradient=True,
)

# -- complex numbers

state(aten.view_as_real.default, aten.real.default, aten.imag.default, linear_in=(0,))
state(aten._fft_r2c.default, aten._fft_c2c.default, aten._fft_c2r.default, linear_in=(0,))
for _dims in ("", "2", "n"):
    for _kind in ("fft", "ifft", "rfft", "irfft"):
        state(getattr(aten, f"fft_{_kind}{_dims}").default, linear_in=(0,))

# -- while a model is traced

state(aten.rrelu.default, training_flag=(3, "training"))
state(aten.lift.default, aten.lift_fresh.default, aten.positive.default, returns_input=True)
state(aten.dropout_.default, aten.feature_dropout_.default, drops_out=True)
state(aten.alpha_dropout_.default, aten.feature_alpha_dropout_.default, drops_out=True)
state(
    *_overloads("_native_batch_norm_legit", "_native_batch_norm_legit_functional"),
    *_overloads("native_dropout", "rrelu_with_noise"),
    training_only=True,
)
# of any other op that PyTorch composes we assume that it may return a view of its input: schemas do not say
state(
    *_overloads("linear", "bilinear", "matmul", "embedding", "scaled_dot_product_attention"),
    *_overloads("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    *_overloads("batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm", "softmax", "log_softmax"),
    *_overloads("max_pool1d", "max_pool2d", "max_pool3d"),
    *_overloads("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"),
    *_overloads("silu", "selu", "relu6", "prelu", "log_sigmoid", "rrelu", "square"),
    fresh=True,
)
