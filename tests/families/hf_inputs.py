"""Example inputs for any Hugging Face model, by the names of the arguments that its forward takes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from families.shrink import IMAGE, LENGTH

BATCH = 2


def _ids(length: int = LENGTH, start: int = 8) -> Tensor:
    return torch.randint(start, 40, (BATCH, length))


def setting(config: Any, *names: str, default: Any) -> Any:
    """The first of these settings that the configuration or one of its parts has."""
    parts = [config, *(v for v in vars(config).values() if hasattr(v, "to_dict"))]
    for name in names:
        for part in parts:
            value = getattr(part, name, None)
            if value is not None:
                return value
    return default


def _image(config: Any, frames: int | None = None) -> Tensor:
    size = setting(config, "image_size", default=IMAGE)
    height, width = size[-2:] if isinstance(size, list | tuple) else (size, size)
    channels = setting(config, "num_channels", "in_channels", "in_chans", default=3)
    channels = channels if isinstance(channels, int) else 3
    shape = (BATCH, channels, height, width) if frames is None else (BATCH, frames, channels, height, width)
    return torch.randn(shape)


def _mel(config: Any) -> Tensor:
    bins = setting(config, "num_mel_bins", "input_feat_per_channel", "feature_size", "mel_dim", "input_dim", default=80)
    length = setting(config, "max_source_positions", "max_length", default=32)
    return torch.randn(BATCH, bins, 2 * length if isinstance(length, int) and length <= 128 else 64)


def makers(config: Any) -> dict[str, Any]:
    """What each argument may be given; the first that works is kept."""
    width = setting(config, "hidden_size", "d_model", default=32)
    context = setting(config, "context_length", "prediction_length", default=16)
    lags = max(setting(config, "lags_sequence", default=[0]) or [0])
    past = context + lags
    channels = setting(config, "num_input_channels", "input_size", default=1)
    series = (BATCH, past) if channels == 1 else (BATCH, past, channels)
    ahead = setting(config, "prediction_length", default=4) or 4
    features = setting(config, "num_time_features", default=0) or 0
    boxes = torch.randint(0, 30, (BATCH, LENGTH, 2)).repeat(1, 1, 2)
    boxes[..., 2:] += 5
    return {
        "input_ids": _ids,
        "decoder_input_ids": lambda: _ids(4),
        "pixel_values": lambda: _image(config),
        "pixel_values_videos": lambda: _image(config, setting(config, "num_frames", "frames_per_clip", default=4)),
        "input_values": lambda: torch.randn(BATCH, 800),
        "input_features": lambda: _mel(config),
        "spectrogram": lambda: torch.randn(BATCH, 16, setting(config, "num_mel_bins", "model_in_dim", default=80)),
        "bbox": lambda: boxes,
        "attention_mask": lambda: torch.ones(BATCH, LENGTH, dtype=torch.long),
        "inputs_embeds": lambda: torch.randn(BATCH, LENGTH, width),
        "hidden_states": lambda: torch.randn(BATCH, LENGTH, width),
        "encoder_hidden_states": lambda: torch.randn(BATCH, LENGTH, width),
        "query_embeds": lambda: torch.randn(BATCH, 4, width),
        "past_values": lambda: torch.rand(series) + 0.5,
        "past_time_features": lambda: torch.randn(BATCH, past, features or 1),
        "past_observed_mask": lambda: torch.ones(series),
        "future_values": lambda: torch.rand(BATCH, ahead),
        "future_time_features": lambda: torch.randn(BATCH, ahead, features or 1),
        "visual_feats": lambda: torch.randn(BATCH, 4, setting(config, "visual_feat_dim", default=32)),
        "visual_pos": lambda: torch.rand(BATCH, 4, setting(config, "visual_pos_dim", default=4)),
        "visual_embeds": lambda: torch.randn(BATCH, 4, setting(config, "visual_embedding_dim", default=32)),
        "states": lambda: torch.randn(BATCH, LENGTH, setting(config, "state_dim", default=17)),
        "actions": lambda: torch.randn(BATCH, LENGTH, setting(config, "act_dim", default=4)),
        "rewards": lambda: torch.randn(BATCH, LENGTH, 1),
        "returns_to_go": lambda: torch.randn(BATCH, LENGTH, 1),
        "timesteps": lambda: torch.arange(LENGTH).repeat(BATCH, 1),
        "flattened_patches": lambda: _flattened(config),
        "audio_values": lambda: torch.randn(BATCH, 1, 640),
        "audio_codes": lambda: torch.randint(0, 32, (BATCH, setting(config, "num_codebooks", default=4), LENGTH)),
        "input_features_mask": lambda: torch.ones(BATCH, _mel(config).shape[-1], dtype=torch.long),
        "inputs": lambda: _ids(16),
        "entity_ids": lambda: _ids(2, 1),
    }


def _flattened(config: Any) -> Tensor:
    patch = setting(config, "patch_size", default=16)
    rows = torch.arange(4).repeat(BATCH, 1)[..., None].float()
    return torch.cat([rows // 2 + 1, rows % 2 + 1, torch.randn(BATCH, 4, patch * patch * 3)], dim=-1)


ALTERNATIVES: dict[str, list[Any]] = {
    # video models name frames like images; speech models differ in the order of time and frequency, or take raw sound
    "pixel_values": [lambda c: _image(c, setting(c, "num_frames", "frames_per_clip", default=4))],
    "input_values": [lambda c: torch.randn(BATCH, 1, 800), lambda c: _mel(c), lambda c: _mel(c).transpose(1, 2)],
    "input_features": [
        lambda c: _mel(c).transpose(1, 2),
        lambda c: _mel(c)[:, None].transpose(2, 3),
        lambda c: torch.randn(BATCH, 800),
    ],
    "past_values": [lambda c: torch.randn(BATCH, c.context_length, getattr(c, "num_input_channels", 1))],
}


def examples(model: nn.Module, config: Any, given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Calls to try, from what the model insists on to everything that it knows."""
    signature = inspect.signature(model.forward).parameters
    known = {**makers(config), **{name: (lambda v=value: v) for name, value in given.items()}}
    needed = [
        n for n, p in signature.items() if p.default is inspect.Parameter.empty and p.kind == p.POSITIONAL_OR_KEYWORD
    ]
    main = model.main_input_name if isinstance(getattr(model, "main_input_name", None), str) else "input_ids"
    base = list(dict.fromkeys([*needed, *([main] if main in signature else []), *given]))
    extras: list[list[str]] = [
        [],
        ["decoder_input_ids"],
        ["input_ids"],
        ["pixel_values"],
        ["input_ids", "pixel_values"],
        ["pixel_values", "decoder_input_ids"],
        ["input_ids", "bbox"],
        ["input_ids", "bbox", "pixel_values"],
        ["input_features"],
        ["input_values"],
        ["attention_mask"],
        ["inputs_embeds"],
        ["visual_feats", "visual_pos"],
        ["actions", "rewards", "returns_to_go", "timesteps", "attention_mask"],
        ["encoder_hidden_states"],
        ["input_ids", "bbox", "decoder_input_ids"],
        ["past_time_features", "past_observed_mask", "future_values", "future_time_features"],
        ["input_features_mask"],
        ["future_values", "future_time_features"],
    ]
    if getattr(config, "is_encoder_decoder", False):
        extras.insert(0, ["decoder_input_ids"])
    seen: list[list[str]] = []
    for extra in extras:
        names = [*base, *(n for n in extra if n in signature and n not in base)]
        if names in seen or not all(n in known for n in names):
            continue
        seen.append(names)
        yield {n: known[n]() for n in names}
        for name in names:
            for other in ALTERNATIVES.get(name, []) if name not in given else []:
                yield {n: other(config) if n == name else known[n]() for n in names}
