"""Models of transformers, torchvision, timm and diffusers: their classes, in small configurations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.survey.survey_case import TOKENS, Inputs, Size, SurveyCase, images, rows
from benchmarks.survey.zoo import transformers_case

LIBRARIES = ("torchvision", "timm", "diffusers")
"""Those of the group ``survey`` of pyproject.toml."""

# Of the images' heights and widths. Few are multiples of a patch, so that rounding up and down is seen.
_ANY: tuple[Size, ...] = ((37, 41), (53, 47), (71, 67))
_PATCHES_OF_4: tuple[Size, ...] = ((28, 44), (20, 12), (52, 68))
_MULTIPLES_OF_8: tuple[Size, ...] = ((24, 40), (16, 24), (56, 40))
_MULTIPLES_OF_64: tuple[Size, ...] = ((64, 128), (128, 64), (192, 128))

_OPERATORS = """nms qnms roi_align _roi_align_backward ps_roi_align _ps_roi_align_backward roi_pool _roi_pool_backward
ps_roi_pool _ps_roi_pool_backward qroi_align deform_conv2d _deform_conv2d_backward"""

_LINEAR_AND_FULL_ATTENTION: dict[str, Any] = {
    **{"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 4, "full_attention_interval": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "pad_token_id": 0,
}
_LANGUAGE: dict[str, dict[str, Any]] = {
    "DistilBertForMaskedLM": {
        "model_type": "distilbert",
        **{"vocab_size": 96, "dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 32},
    },
    "AlbertForMaskedLM": {
        "model_type": "albert",
        **{"vocab_size": 96, "embedding_size": 16, "hidden_size": 32, "num_hidden_layers": 4, "num_hidden_groups": 2},
        **{"num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 32},
        "classifier_dropout_prob": 0.1,
    },
    "DebertaV2ForMaskedLM": {
        "model_type": "deberta-v2",
        **{"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4},
        **{"intermediate_size": 48, "max_position_embeddings": 32, "relative_attention": True, "position_buckets": 8},
        **{"pos_att_type": ["p2c", "c2p"], "share_att_key": True, "norm_rel_ebd": "layer_norm"},
    },
    "FalconForCausalLM": {
        "model_type": "falcon",
        **{"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4},
        **{"new_decoder_architecture": True, "num_kv_heads": 2, "hidden_dropout": 0.1},
    },
    "XGLMForCausalLM": {
        "model_type": "xglm",
        **{"vocab_size": 96, "d_model": 32, "ffn_dim": 48, "num_layers": 3, "attention_heads": 4},
        "max_position_embeddings": 32,
    },
    "XLNetLMHeadModel": {
        "model_type": "xlnet",
        **{"vocab_size": 96, "d_model": 32, "n_layer": 3, "n_head": 4, "d_inner": 48, "mem_len": None},
        "use_mems_eval": False,
    },
    "ProphetNetForConditionalGeneration": {
        "model_type": "prophetnet",
        **{"vocab_size": 96, "hidden_size": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
        **{"num_encoder_layers": 2, "num_decoder_layers": 2, "max_position_embeddings": 40, "use_cache": False},
        **{"num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "num_buckets": 8},
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0},
    },
    "Llama4ForCausalLM": {
        "model_type": "llama4_text",
        **{"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 8},
        **{"num_key_value_heads": 2, "intermediate_size": 24, "intermediate_size_mlp": 48, "num_local_experts": 4},
        **{"interleave_moe_layer_step": 2, "attention_chunk_size": 6, "floor_scale": 4, "pad_token_id": 0},
    },
    "Qwen3NextForCausalLM": {
        "model_type": "qwen3_next",
        **_LINEAR_AND_FULL_ATTENTION,
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        "shared_expert_intermediate_size": 24,
    },
    "Qwen3_5ForCausalLM": {
        "model_type": "qwen3_5_text",
        **_LINEAR_AND_FULL_ATTENTION,
        "rope_parameters": {
            **{"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            **{"mrope_section": [2, 1, 1], "mrope_interleaved": True},
        },
    },
    "Zamba2ForCausalLM": {
        "model_type": "zamba2",
        **{"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4},
        **{"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "intermediate_size": 48, "use_mem_rope": True},
        **{"mamba_d_state": 8, "mamba_ngroups": 2, "n_mamba_heads": 4, "chunk_size": 4, "num_mem_blocks": 1},
        **{"use_shared_attention_adapter": True, "adapter_rank": 4, "max_position_embeddings": 32},
    },
    "GraniteMoeHybridForCausalLM": {
        "model_type": "granitemoehybrid",
        **{"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4},
        **{"layer_types": ["mamba", "attention", "mamba", "attention"], "num_key_value_heads": 2},
        **{"intermediate_size": 24, "shared_intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2},
        **{"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 4, "pad_token_id": 0},
        **{"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0},
        **{"attention_multiplier": 0.125, "position_embedding_type": "rope", "max_position_embeddings": 32},
    },
}

# Their linear attention has a loop over chunks of 64 tokens. The last length has a second one.
_IN_CHUNKS_OF_64 = ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM")
_CHUNKS: tuple[Size, ...] = ((13,), (7,), (70,))

# A length of more than 7 blocks, below which the attention becomes a full one.
_BLOCKS: tuple[Size, ...] = ((40,), (45,), (50,))
_BIG_BIRD: dict[str, Any] = {
    "model_type": "big_bird",
    **{"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48},
    **{"max_position_embeddings": 64, "attention_type": "block_sparse", "block_size": 5, "num_random_blocks": 1},
}


def library_cases() -> list[SurveyCase]:
    """Models of transformers, and of those other libraries that are installed."""
    import_torchvision()
    cases = [transformers_case(name, fields) for name, fields in _LANGUAGE.items()]
    cases = [replace(case, sizes=_CHUNKS) if case.name in _IN_CHUNKS_OF_64 else case for case in cases]
    cases.append(replace(transformers_case("BigBirdForMaskedLM", _BIG_BIRD), sizes=_BLOCKS))
    cases += _sound_and_images()
    makers: dict[str, Callable[[], list[SurveyCase]]] = {
        "torchvision": _torchvision,
        "timm": _timm,
        "diffusers": _diffusers,
    }
    for library, make in makers.items():
        if find_spec(library):
            cases += make()
    return cases


@cache
def import_torchvision() -> None:
    """Import torchvision if it is there, before timm, transformers or diffusers do.

    Its wheels on package indexes are built for CUDA. Beside a torch for the CPU their operators do not load, and
    torchvision cannot be imported without their declarations. No model of the survey calls one.
    """
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    try:
        for file in Path(spec.origin).parent.glob("_C*.so"):
            torch.ops.load_library(file)
    except OSError:
        for name in _OPERATORS.split():
            torch.library.define(f"torchvision::{name}", "(Tensor x) -> Tensor")
    import_module("torchvision")


def _sound_and_images() -> list[SurveyCase]:
    """Models of transformers that take sound or images, with text or alone."""
    import transformers

    text = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    sight = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}

    def clip() -> nn.Module:
        config = transformers.CLIPConfig(
            text_config={**text, "intermediate_size": 48, "max_position_embeddings": 32, "eos_token_id": 95},
            vision_config={**sight, "image_size": 16, "patch_size": 4},
            projection_dim=24,
        )
        return transformers.CLIPModel(config)

    def whisper() -> nn.Module:
        config = transformers.WhisperConfig(
            **{"vocab_size": 96, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 8},
            **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48},
            **{"decoder_ffn_dim": 48, "max_source_positions": 20, "max_target_positions": 32, "use_cache": False},
            **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
        )
        return transformers.WhisperForConditionalGeneration(config)

    def segformer() -> nn.Module:
        config = transformers.SegformerConfig(
            **{"num_encoder_blocks": 3, "depths": [1, 1, 1], "hidden_sizes": [8, 16, 24], "patch_sizes": [7, 3, 3]},
            **{"sr_ratios": [4, 2, 1], "strides": [4, 2, 2], "num_attention_heads": [1, 2, 4], "mlp_ratios": [2, 2, 2]},
            **{"decoder_hidden_size": 16, "num_labels": 5},
        )
        return transformers.SegformerForSemanticSegmentation(config)

    def wav2vec2() -> nn.Module:
        # Layers that are dropped, and times that are masked, are drawn outside of the graph.
        config = transformers.Wav2Vec2Config(
            **{"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4},
            **{"intermediate_size": 48, "conv_dim": (8, 12, 16), "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 2)},
            **{"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4},
            **{"layerdrop": 0.0, "apply_spec_augment": False},
        )
        return transformers.Wav2Vec2ForCTC(config)

    def mobilevit() -> nn.Module:
        config = transformers.MobileViTConfig(
            **{"hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32], "num_labels": 5},
            **{"num_attention_heads": 4, "expand_ratio": 2.0, "image_size": 64},
        )
        return transformers.MobileViTForImageClassification(config)

    def focalnet() -> nn.Module:
        config = transformers.FocalNetConfig(
            **{"image_size": 32, "patch_size": 2, "embed_dim": 8, "hidden_sizes": [16, 32, 32], "depths": [1, 2, 1]},
            **{"focal_levels": [2, 2, 2], "focal_windows": [3, 3, 3], "use_layerscale": True, "num_labels": 5},
        )
        return transformers.FocalNetForImageClassification(config)

    def text_and_image(batch: int, size: Size) -> Inputs:
        return (), {"input_ids": torch.randint(96, (batch, *size)), "pixel_values": torch.randn(batch, 3, 16, 16)}

    def sound(batch: int, size: Size) -> Inputs:
        return (), {"input_features": torch.randn(batch, 8, 40), "decoder_input_ids": torch.randint(96, (batch, *size))}

    return [
        SurveyCase("CLIPModel", "transformers", clip, text_and_image, TOKENS),
        SurveyCase("WhisperForConditionalGeneration", "transformers", whisper, sound, TOKENS),
        SurveyCase("SegformerForSemanticSegmentation", "transformers", segformer, images(), _ANY),
        SurveyCase("Wav2Vec2ForCTC", "transformers", wav2vec2, rows(), ((403,), (331,), (517,))),
        SurveyCase("MobileViTForImageClassification", "transformers", mobilevit, images(), _MULTIPLES_OF_64),
        SurveyCase("FocalNetForImageClassification", "transformers", focalnet, images(), _ANY),
    ]


def _torchvision() -> list[SurveyCase]:
    from torchvision import models
    from torchvision.models import efficientnet, mobilenetv3, regnet, shufflenetv2

    def efficient() -> nn.Module:
        setting = ((1, 3, 1, 8, 8, 1), (4, 3, 2, 8, 12, 2), (4, 5, 2, 12, 16, 2))
        blocks = [efficientnet.MBConvConfig(*numbers) for numbers in setting]
        return models.EfficientNet(blocks, dropout=0.2, num_classes=10, last_channel=32)

    def mobile() -> nn.Module:
        setting = ((16, 3, 16, 16, True, "RE", 2, 1), (16, 3, 32, 24, False, "RE", 2, 1))
        deeper = ((24, 5, 48, 24, True, "HS", 1, 1), (24, 5, 48, 24, True, "HS", 1, 1))
        blocks = [mobilenetv3.InvertedResidualConfig(*numbers, 1.0) for numbers in (*setting, *deeper)]
        return models.MobileNetV3(blocks, last_channel=32, num_classes=10)

    def reg() -> nn.Module:
        parameters = regnet.BlockParams.from_init_params(
            depth=4, w_0=16, w_a=8.0, w_m=2.0, group_width=8, se_ratio=0.25
        )
        return models.RegNet(parameters, num_classes=10, stem_width=8)

    def vgg() -> nn.Module:
        layers = models.vgg.make_layers([8, "M", 16, "M", 16, 24, "M"], batch_norm=True)
        model = models.VGG(layers, num_classes=10, init_weights=False)
        model.classifier = nn.Sequential(nn.Linear(24 * 7 * 7, 32), nn.ReLU(True), nn.Dropout(), nn.Linear(32, 10))
        return model

    builders: dict[str, tuple[Callable[[], nn.Module], tuple[Size, ...]]] = {
        "DenseNet": (lambda: models.DenseNet(4, (2, 2, 2), 8, bn_size=2, num_classes=10), _ANY),
        "EfficientNet": (efficient, _ANY),
        "GoogLeNet, auxiliary heads": (
            lambda: models.GoogLeNet(num_classes=10, init_weights=False),
            ((64, 72), (48, 56), (80, 88)),
        ),
        "MobileNetV3": (mobile, _ANY),
        "RegNet": (reg, _ANY),
        "ShuffleNetV2": (
            lambda: shufflenetv2.ShuffleNetV2([2, 2, 2], [8, 16, 24, 32, 48], num_classes=10),
            _ANY,
        ),
        "SwinTransformer": (
            lambda: models.SwinTransformer([4, 4], 16, [2, 2], [2, 4], window_size=[3, 3], num_classes=10),
            ((48, 72), (24, 48), (72, 96)),
        ),
        "VGG": (vgg, _ANY),
    }
    return [SurveyCase(name, "torchvision", build, images(), sizes) for name, (build, sizes) in builders.items()]


def _timm() -> list[SurveyCase]:
    from timm.models import cait, convnext, mlp_mixer, vision_transformer, xcit

    fixed: dict[str, Any] = {"img_size": (28, 44), "patch_size": 4, "num_classes": 10, "embed_dim": 32}
    builders: dict[str, tuple[Callable[[], nn.Module], tuple[Size, ...]]] = {
        "VisionTransformer, stochastic depth": (
            lambda: vision_transformer.VisionTransformer(
                **fixed, depth=4, num_heads=4, drop_path_rate=0.3, dynamic_img_size=True, init_values=1e-5
            ),
            _PATCHES_OF_4,
        ),
        "Cait": (lambda: cait.Cait(**fixed, depth=3, num_heads=4, drop_path_rate=0.2), _PATCHES_OF_4),
        "MlpMixer": (lambda: mlp_mixer.MlpMixer(**fixed, num_blocks=4, drop_path_rate=0.2), _PATCHES_OF_4),
        "ConvNeXt V2": (
            lambda: convnext.ConvNeXt(
                depths=(1, 2, 1, 1),
                dims=(8, 16, 24, 32),
                num_classes=10,
                use_grn=True,
                ls_init_value=None,
                conv_mlp=True,
                drop_path_rate=0.2,
            ),
            _ANY,
        ),
        "Xcit": (
            lambda: xcit.Xcit(**{**fixed, "img_size": (24, 40), "patch_size": 8}, depth=3, num_heads=4, eta=1e-5),
            _MULTIPLES_OF_8,
        ),
    }
    return [SurveyCase(name, "timm", build, images(), sizes) for name, (build, sizes) in builders.items()]


def _diffusers() -> list[SurveyCase]:
    import diffusers

    def unet() -> nn.Module:
        return diffusers.UNet2DConditionModel(
            block_out_channels=(8, 16),
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            layers_per_block=1,
            cross_attention_dim=12,
            attention_head_dim=4,
            norm_num_groups=4,
        )

    def autoencoder() -> nn.Module:
        return diffusers.AutoencoderKL(
            block_out_channels=(8, 16),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            norm_num_groups=4,
        )

    def sd3() -> nn.Module:
        return diffusers.SD3Transformer2DModel(
            sample_size=16,
            in_channels=4,
            out_channels=4,
            num_layers=3,
            attention_head_dim=8,
            num_attention_heads=4,
            joint_attention_dim=12,
            caption_projection_dim=32,
            pooled_projection_dim=20,
            pos_embed_max_size=24,
        )

    def flux() -> nn.Module:
        return diffusers.FluxTransformer2DModel(
            in_channels=16,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=12,
            pooled_projection_dim=20,
            guidance_embeds=True,
            axes_dims_rope=(4, 6, 6),
        )

    def noisy(batch: int, size: Size) -> Inputs:
        text = torch.randn(batch, 7, 12)
        return (torch.randn(batch, 4, *size), torch.randint(1000, (batch,)), text), {}

    def noisy_with_text(batch: int, size: Size) -> Inputs:
        image, text, pooled = torch.randn(batch, 4, *size), torch.randn(batch, 7, 12), torch.randn(batch, 20)
        return (image, text, pooled, torch.randint(1000, (batch,))), {}

    def noisy_patches(batch: int, size: Size) -> Inputs:
        """Patches of an image and their places, text, and how closely the image follows it."""
        height, width = size
        rows, columns = torch.arange(height).repeat_interleave(width), torch.arange(width).repeat(height)
        return (), {
            "hidden_states": torch.randn(batch, height * width, 16),
            "encoder_hidden_states": torch.randn(batch, 7, 12),
            "pooled_projections": torch.randn(batch, 20),
            "timestep": torch.rand(batch),
            "guidance": torch.full((batch,), 3.5),
            "img_ids": torch.stack((torch.zeros_like(rows), rows, columns), dim=-1).float(),
            "txt_ids": torch.zeros(7, 3),
        }

    return [
        SurveyCase("UNet2DConditionModel", "diffusers", unet, noisy, ((14, 22), (10, 6), (26, 34))),
        SurveyCase("AutoencoderKL", "diffusers", autoencoder, images(), ((14, 22), (10, 6), (26, 34))),
        SurveyCase("SD3Transformer2DModel", "diffusers", sd3, noisy_with_text, ((14, 22), (10, 6), (26, 34))),
        SurveyCase("FluxTransformer2DModel", "diffusers", flux, noisy_patches, ((4, 5), (3, 6), (7, 8))),
    ]
