"""What single architectures need beyond the general recipe: settings of the configuration, arguments of the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Settings = dict[str, Any]


def _resnet(*stages: str) -> Settings:
    """A small backbone in place of one that would be downloaded."""
    return {
        "model_type": "resnet",
        "embedding_size": 8,
        "hidden_sizes": [8, 8, 16, 16],
        "depths": [1, 1, 1, 1],
        "layer_type": "basic",
        "out_features": list(stages),
    }


_DETR = {
    "use_timm_backbone": False,
    "backbone": None,
    "backbone_config": _resnet("stage4"),
    "use_pretrained_backbone": False,
}
_SEVERAL = {**_DETR, "backbone_config": _resnet("stage2", "stage3", "stage4")}
_RT = {
    "backbone_config": {**_resnet("stage2", "stage3", "stage4"), "model_type": "rt_detr_resnet"},
    "encoder_in_channels": [8, 16, 16],
    "decoder_in_channels": [32, 32, 32],
    "feat_channels": [32, 32, 32],
}
_SWIN = {
    "model_type": "swin",
    "image_size": 64,
    "window_size": 2,
    "embed_dim": 8,
    "depths": [1, 1, 1, 1],
    "num_heads": [2, 2, 2, 2],
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}
_MASKS = {
    "backbone_config": _SWIN,
    "feature_size": 32,
    "mask_feature_size": 32,
    "hidden_dim": 32,
    "num_queries": 4,
    "fpn_feature_size": 32,
}
_WINDOWS = {"image_size": 64, "window_size": 2, "patch_size": 4}
_DPT = {"neck_hidden_sizes": [8, 8, 8, 8], "backbone_out_indices": [0, 1, 2, 3], "num_hidden_layers": 4}
_DINO = {
    "model_type": "dinov2",
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
    "reshape_hidden_states": False,
    "apply_layernorm": True,
}
_DEPTH = {
    "backbone_config": _DINO,
    "neck_hidden_sizes": [8, 8, 8, 8],
    "reassemble_hidden_size": 16,
    "fusion_hidden_size": 8,
}
_SERIES = {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "num_time_features": 1}

_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_HALF_SECTIONS = {**_SECTIONS, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
_SAM = {
    "prompt_encoder_config.image_embedding_size": 2,
    "prompt_encoder_config.image_size": 32,
    "vision_config.num_pos_feats": 16,
}
SECTIONS = ["qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_thinker", "glm46v", "glm4v", "glm_image", "glm_ocr", "paddleocr_vl"]

SETTINGS: dict[str, Settings] = {
    **{kind: {"text_config.rope_parameters": _SECTIONS} for kind in SECTIONS},
    **{f"{kind}_text": {"rope_parameters": _SECTIONS} for kind in SECTIONS},
    "glm4v_moe": {"text_config.rope_parameters": _HALF_SECTIONS},
    "glm4v_moe_text": {"rope_parameters": _HALF_SECTIONS},
    "detr": _DETR,
    "conditional_detr": _DETR,
    "dab-detr": _DETR,
    "table-transformer": _DETR,
    "deformable_detr": _SEVERAL,
    "rt_detr": _RT,
    "rt_detr_v2": _RT,
    "d_fine": {**_RT, "backbone_config": _resnet("stage2", "stage3", "stage4")},
    "mask2former": _MASKS,
    "maskformer": _MASKS,
    "oneformer": _MASKS,
    "bros": {"hidden_size": 64},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "moe_intermediate_size": 16},
    "sam": _SAM,
    "sam_hq": _SAM,
    "sam2": {"vision_config.backbone_config.hidden_size": 8},
    "sam2_vision_model": {"backbone_config.hidden_size": 8},
    "sam2_hiera_det_model": {"hidden_size": 8},
    "pix2struct": {"vision_config.patch_embed_hidden_size": 768},
    "pix2struct_vision_model": {"patch_embed_hidden_size": 768},
    "audio-spectrogram-transformer": {"max_length": 64, "num_mel_bins": 32},
    "upernet": {"backbone_config": _resnet("stage1", "stage2", "stage3", "stage4")},
    "swin": _WINDOWS,
    "swinv2": _WINDOWS,
    "donut-swin": _WINDOWS,
    "maskformer-swin": _WINDOWS,
    "dpt": {**_DPT, "image_size": 32, "patch_size": 8},
    "depth_anything": _DEPTH,
    "prompt_depth_anything": _DEPTH,
    "zoedepth": _DEPTH,
    "autoformer": _SERIES,
    "informer": _SERIES,
    "time_series_transformer": _SERIES,
    "efficientnet": {"image_size": 32, "width_coefficient": 0.25, "depth_coefficient": 0.2, "hidden_dim": 320},
    "align": {
        "vision_config.width_coefficient": 0.25,
        "vision_config.depth_coefficient": 0.2,
        "vision_config.hidden_dim": 320,
    },
    "bit": {"num_groups": 4},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 4},
    "reformer": {
        "axial_pos_shape": [4, 16],
        "axial_pos_embds_dim": [8, 24],
        "attn_layers": ["local", "lsh"],
        "num_buckets": 2,
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "hash_seed": 0,
    },
    "xmod": {"default_language": "en_XX"},
    "wav2vec2-bert": {"vocab_size": 64, "feature_projection_input_dim": 160},
    "wav2vec2-conformer": {"vocab_size": 64},
    "zamba": {"num_hidden_layers": 6, "layers_block_type": ["mamba", "hybrid"] * 3},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0},
    "levit": {"image_size": 64, "hidden_sizes": [16, 32, 48], "num_attention_heads": [2, 2, 2]},
    "mobilevitv2": {"image_size": 64},
    "patchtst": {"context_length": 32, "num_input_channels": 2},
    "patchtsmixer": {"context_length": 32, "num_input_channels": 2},
    "ernie4_5_moe": {"moe_k": 2},
    "hgnet_v2": {"hidden_sizes": [8, 16, 24, 2048]},
    "led": {"attention_window": 4},
    "longformer": {"attention_window": 4},
    "perceiver": {"num_blocks": 1, "num_self_attends_per_block": 2, "d_latents": 32},
    "moonshine_streaming": {"num_key_value_heads": 2},
    "step3p7": {"text_config.sliding_window": 4},
    "siglip2": {"vision_config.num_patches": 16, "vision_config.patch_size": 4},
    "siglip2_vision_model": {"num_patches": 16, "patch_size": 4},
    "vitmatte": {"backbone_config.out_features": ["stage2"]},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}, "d_model": 32, "n_heads": 2},
    "markuplm": {"max_xpath_tag_unit_embeddings": 256},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "t5gemma2_encoder": {"text_config.dropout_rate": 0.0},
    "glm5_next_text": {"index_topk": 16},
    "glm5_next": {"text_config.index_topk": 16},
    "granite_speech5_ctc": {"context_size": 16},
    "granite_speech5_encoder": {"context_size": 16},
}


def _patches(config: Any) -> dict[str, Any]:
    """A vision tower that takes a list of patches of one image, and its height and width in patches."""
    patch, time = getattr(config, "patch_size", 14), getattr(config, "temporal_patch_size", 1)
    pixels = torch.randn(16, getattr(config, "in_channels", 3) * time * patch * patch)
    return {"hidden_states": pixels, "grid_thw": torch.tensor([[1, 4, 4]])}


def _naflex(config: Any) -> dict[str, Any]:
    part = getattr(config, "vision_config", config)
    return {
        "pixel_values": torch.randn(2, 16, part.num_channels * part.patch_size**2),
        "pixel_attention_mask": torch.ones(2, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4], [4, 4]]),
    }


TOWERS = [
    "qwen2_vl_vision",
    "qwen2_5_vl_vision",
    "qwen3_vl_vision",
    "qwen3_vl_moe_vision",
    "qwen3_5_vision",
    "qwen3_5_moe_vision",
    "glm4v_vision",
    "glm4v_moe_vision",
    "glm_ocr_vision",
    "qwen4_exp_vision",
    "exaone4_5_vision",
    "cohere_compass_vision",
    "glm5_next_vision",
]

ARGUMENTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    **dict.fromkeys(TOWERS, _patches),
    "siglip2": _naflex,
    "siglip2_vision_model": _naflex,
    **dict.fromkeys(["musicgen", "musicgen_melody"], lambda _: {"input_ids": torch.randint(0, 32, (8, 8))}),
    "moonshine": lambda _: {"input_values": torch.randn(2, 3200)},
    "muse_spark_audio": lambda _: {"input_values": torch.randn(2, 960)},
    "vit_mae": lambda _: {"noise": torch.rand(2, 4)},
    "wav2vec2-bert": lambda _: {"input_features": torch.randn(2, 16, 160)},
    "audio-spectrogram-transformer": lambda _: {"input_values": torch.randn(2, 64, 32)},
    "udop": lambda _: {"bbox": torch.rand(2, 8, 4)},
}

# Where the first task that the library lists is not one that a small example serves.
ARCHITECTURES = {"perceiver": "PerceiverForMaskedLM"}
