"""Networks of five libraries, with random weights and small sizes: what `make test-long` slims.

They need more packages than the other tests, which `make test-long` puts into a folder of their own.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from architectures import IDS, Case


def images(size: int) -> torch.Tensor:
    return torch.linspace(-3, 3, 2 * 3 * size * size).reshape(2, 3, size, size).sin()


def with_torchvision() -> None:
    """Let torchvision be imported where its compiled part does not load: with a build of torch for CPUs alone.

    Two operators are declared that its import expects; no network here uses them.
    """
    try:
        torch.ops.torchvision.nms  # noqa: B018
    except AttributeError:
        try:
            import torchvision  # noqa: F401
        except RuntimeError:
            library = torch.library.Library("torchvision", "FRAGMENT")
            for name in ("nms", "qnms"):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _DECLARED.append(library)  # a library's operators live as long as it does


_DECLARED: list[Any] = []


def of_torchvision(name: str, size: int = 32, **options: Any) -> Callable[[], Case]:
    def made() -> Case:
        with_torchvision()
        from torchvision import models

        return models.get_model(name, weights=None, **options), (images(size),), {}

    return made


def small(kind: str, size: int = 32, **sizes: Any) -> Callable[[], Case]:
    """A class of torchvision with sizes of our own."""

    def made() -> Case:
        with_torchvision()
        from torchvision import models

        return getattr(models, kind)(**sizes, num_classes=5), (images(size),), {}

    return made


def vgg() -> Case:
    with_torchvision()
    from torchvision.models import vgg

    features = vgg.make_layers([16, "M", 24, 24, "M", 32, "M"], batch_norm=True)
    head = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 40), nn.ReLU(), nn.Dropout(), nn.Linear(40, 5)]
    return nn.Sequential(features, *head), (images(32),), {}


def efficientnet() -> Case:
    with_torchvision()
    from torchvision.models.efficientnet import EfficientNet, FusedMBConvConfig, MBConvConfig

    blocks = [FusedMBConvConfig(2, 3, 1, 8, 8, 2), MBConvConfig(4, 3, 2, 8, 12, 2), MBConvConfig(4, 5, 1, 12, 16, 2)]
    return EfficientNet(blocks, dropout=0.0, stochastic_depth_prob=0.0, num_classes=5), (images(32),), {}


def convnext() -> Case:
    with_torchvision()
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt([CNBlockConfig(8, 12, 2), CNBlockConfig(12, None, 2)], num_classes=5), (images(32),), {}


def regnet() -> Case:
    with_torchvision()
    from torchvision.models.regnet import BlockParams, RegNet

    sizes = BlockParams.from_init_params(depth=4, w_0=16, w_a=8, w_m=2.0, group_width=8, se_ratio=0.25)
    return RegNet(sizes, num_classes=5, stem_width=8), (images(64),), {}


def mixer() -> Case:
    with_torchvision()
    from timm.models.mlp_mixer import MlpMixer

    return MlpMixer(num_classes=5, img_size=32, patch_size=8, num_blocks=2, embed_dim=16), (images(32),), {}


def of_timm(name: str, size: int = 32, **options: Any) -> Callable[[], Case]:
    def made() -> Case:
        with_torchvision()
        import timm

        return timm.create_model(name, pretrained=False, num_classes=5, **options), (images(size),), {}

    return made


def of_transformers(kind: str, config: str, inputs: dict[str, Any], **sizes: Any) -> Callable[[], Case]:
    def made() -> Case:
        with_torchvision()
        import transformers

        # Grouped products, by which experts are computed otherwise, are not known to torch in float64.
        of_config = getattr(transformers, kind)._from_config
        return of_config(getattr(transformers, config)(**sizes), experts_implementation="batched_mm"), (), inputs

    return made


WORDS = {"input_ids": IDS, "use_cache": False}
BERT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 20, "vocab_size": 11}
LLAMA = {**BERT, "num_hidden_layers": 2, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
EXPERTS = {"num_experts": 5, "num_local_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
VISION = {
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 10,
    "image_size": 16,
    "patch_size": 8,
}


def clip() -> Case:
    with_torchvision()
    from transformers import CLIPConfig, CLIPModel

    text = {**LLAMA, "max_position_embeddings": 8, "projection_dim": 6}
    config = CLIPConfig(text_config=text, vision_config={**VISION, "projection_dim": 6}, projection_dim=6)
    return CLIPModel(config), (), {"input_ids": IDS, "pixel_values": images(16), "attention_mask": torch.ones_like(IDS)}


STEPS = torch.tensor([3, 7])
TEXT = torch.linspace(-2, 2, 2 * 5 * 24).reshape(2, 5, 24).cos()
LATENT = images(16).repeat(1, 2, 1, 1)[:, :4]
UNET = {"layers_per_block": 1, "block_out_channels": (16, 32), "norm_num_groups": 4, "attention_head_dim": 4}
DIFFUSION = {"attention_head_dim": 8, "num_attention_heads": 3, "in_channels": 4, "num_layers": 2, "patch_size": 2}


def of_diffusers(
    kind: str, *args: torch.Tensor, inputs: dict[str, Any] | None = None, **sizes: Any
) -> Callable[[], Case]:
    def made() -> Case:
        with_torchvision()
        import diffusers

        return getattr(diffusers, kind)(**sizes), args, inputs or {}

    return made


def segmentation(kind: str, encoder: str) -> Callable[[], Case]:
    def made() -> Case:
        with_torchvision()
        import segmentation_models_pytorch as smp

        return getattr(smp, kind)(encoder, encoder_weights=None, classes=3), (images(64),), {}

    return made


ZOO: dict[str, Callable[[], Case]] = {
    "torchvision resnet34": of_torchvision("resnet34"),
    "torchvision resnet50": of_torchvision("resnet50"),
    "torchvision vgg": vgg,
    "torchvision densenet": small("DenseNet", growth_rate=4, block_config=(2, 2), num_init_features=8, bn_size=2),
    "torchvision mobilenet_v2": of_torchvision("mobilenet_v2", 64, width_mult=0.25),
    "torchvision mobilenet_v3_small": of_torchvision("mobilenet_v3_small"),
    "torchvision efficientnet": efficientnet,
    "torchvision convnext": convnext,
    "torchvision shufflenet_v2": small(
        "ShuffleNetV2", 64, stages_repeats=[2, 2, 2], stages_out_channels=[8, 12, 16, 24, 32]
    ),
    "torchvision squeezenet1_1": of_torchvision("squeezenet1_1", 64),
    "torchvision regnet_y": regnet,
    "torchvision swin": small(
        "SwinTransformer",
        64,
        patch_size=[4, 4],
        embed_dim=12,
        depths=[2, 2],
        num_heads=[3, 6],
        window_size=[4, 4],
    ),
    "torchvision vit": small(
        "VisionTransformer", image_size=32, patch_size=16, num_layers=2, num_heads=3, hidden_dim=12, mlp_dim=20
    ),
    "timm resnet18": of_timm("resnet18"),
    "timm resnext50_32x4d": of_timm("resnext50_32x4d", layers=(1, 1, 1, 1)),
    "timm vit_tiny_patch16_224": of_timm("vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=12),
    "timm deit_tiny_patch16_224": of_timm("deit_tiny_patch16_224", img_size=32, depth=2, embed_dim=12),
    "timm mobilenetv3_small_050": of_timm("mobilenetv3_small_050", 64),
    "timm test_efficientnet": of_timm("test_efficientnet", 64),
    "timm test_efficientnet_evos": of_timm("test_efficientnet_evos", 64),
    "timm test_convnext": of_timm("test_convnext", 64),
    "timm test_convnext2": of_timm("test_convnext2", 64),
    "timm swin_tiny_patch4_window7_224": of_timm(
        "swin_tiny_patch4_window7_224", 64, img_size=64, embed_dim=12, depths=(2, 2), num_heads=(3, 6), window_size=4
    ),
    "timm test_byobnet": of_timm("test_byobnet", 64),
    "timm test_nfnet": of_timm("test_nfnet", 64),
    "timm test_resnet": of_timm("test_resnet", 64),
    "timm test_vit": of_timm("test_vit", 64, img_size=64),
    "timm mixer": mixer,
    "timm mobilenetv4_conv_small_035": of_timm("mobilenetv4_conv_small_035", 64),
    "transformers bert": of_transformers("BertForSequenceClassification", "BertConfig", {"input_ids": IDS}, **BERT),
    "transformers distilbert": of_transformers(
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        {"input_ids": IDS},
        dim=16,
        n_layers=2,
        n_heads=4,
        hidden_dim=20,
        vocab_size=11,
    ),
    "transformers roberta": of_transformers(
        "RobertaForMaskedLM", "RobertaConfig", {"input_ids": IDS + 2}, **{**BERT, "vocab_size": 14}
    ),
    "transformers llama": of_transformers("LlamaForCausalLM", "LlamaConfig", WORDS, **LLAMA),
    "transformers llama with shared keys": of_transformers(
        "LlamaForCausalLM", "LlamaConfig", WORDS, **LLAMA, num_key_value_heads=2
    ),
    "transformers qwen2": of_transformers("Qwen2ForCausalLM", "Qwen2Config", WORDS, **LLAMA, num_key_value_heads=2),
    "transformers qwen3_moe": of_transformers(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig", WORDS, **LLAMA, num_key_value_heads=2, head_dim=4, **EXPERTS
    ),
    "transformers gpt_oss": of_transformers(
        "GptOssForCausalLM", "GptOssConfig", WORDS, **LLAMA, num_key_value_heads=2, head_dim=4, **EXPERTS
    ),
    "transformers opt": of_transformers(
        "OPTForCausalLM",
        "OPTConfig",
        WORDS,
        hidden_size=16,
        word_embed_proj_dim=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=20,
        vocab_size=11,
        max_position_embeddings=16,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    ),
    "transformers t5": of_transformers(
        "T5ForConditionalGeneration",
        "T5Config",
        {"input_ids": IDS, "decoder_input_ids": IDS.flip(1), "use_cache": False},
        d_model=16,
        d_kv=4,
        d_ff=20,
        num_layers=2,
        num_heads=4,
        vocab_size=11,
        decoder_start_token_id=0,
    ),
    "transformers whisper": of_transformers(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {"input_features": images(16)[:, 0], "decoder_input_ids": IDS, "use_cache": False},
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=20,
        decoder_ffn_dim=20,
        num_mel_bins=16,
        max_source_positions=8,
        max_target_positions=16,
        vocab_size=11,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        decoder_start_token_id=0,
    ),
    "transformers clip": clip,
    "transformers swin": of_transformers(
        "SwinForImageClassification",
        "SwinConfig",
        {"pixel_values": images(32)},
        image_size=32,
        patch_size=4,
        embed_dim=12,
        depths=[2, 2],
        num_heads=[3, 6],
        window_size=4,
    ),
    "diffusers unet": of_diffusers(
        "UNet2DModel",
        images(16),
        STEPS,
        **UNET,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ),
    "diffusers unet of text": of_diffusers(
        "UNet2DConditionModel",
        LATENT,
        STEPS,
        TEXT,
        **UNET,
        cross_attention_dim=24,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ),
    "diffusers autoencoder": of_diffusers(
        "AutoencoderKL",
        images(16),
        block_out_channels=(16, 32),
        norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
    ),
    "diffusers dit": of_diffusers(
        "DiTTransformer2DModel",
        LATENT,
        inputs={"timestep": STEPS, "class_labels": STEPS % 2},
        **DIFFUSION,
        sample_size=16,
        norm_num_groups=4,
        num_embeds_ada_norm=10,
    ),
    "diffusers stable diffusion 3": of_diffusers(
        "SD3Transformer2DModel",
        LATENT,
        inputs={"encoder_hidden_states": TEXT, "pooled_projections": TEXT[:, 0, :20], "timestep": STEPS},
        **DIFFUSION,
        sample_size=16,
        joint_attention_dim=24,
        caption_projection_dim=24,
        pooled_projection_dim=20,
        out_channels=4,
    ),
    "diffusers flux": of_diffusers(
        "FluxTransformer2DModel",
        inputs={
            "hidden_states": LATENT.flatten(2).mT[:, :9],
            "encoder_hidden_states": TEXT,
            "pooled_projections": TEXT[:, 0, :20],
            "timestep": STEPS / 10,
            "img_ids": TEXT[0, 0, :9, None] * torch.arange(3),
            "txt_ids": TEXT[0, 0, :5, None] * torch.arange(3),
        },
        **{**DIFFUSION, "patch_size": 1, "num_layers": 1},
        num_single_layers=1,
        joint_attention_dim=24,
        pooled_projection_dim=20,
        axes_dims_rope=(2, 2, 4),
    ),
    "segmentation unet": segmentation("Unet", "resnet18"),
    "segmentation deeplabv3+": segmentation("DeepLabV3Plus", "resnet18"),
}
