"""The transforms of albumentations that a recipe may have (``albumentations``)."""

from __future__ import annotations

from typing import Any

from yolofleet.storage.yaml_lines import read_scalar
from yolofleet.support.errors import ConfigError
from yolofleet.support.text import did_you_mean, shown

# Classes of albumentations 2.0 that change pixels, move none, and whose parameters are plain values.
TRANSFORMS = (
    "AdditiveNoise", "AdvancedBlur", "AutoContrast", "Blur", "CLAHE", "ChannelDropout", "ChannelShuffle",
    "ChromaticAberration", "ColorJitter", "Defocus", "Downscale", "Emboss", "Equalize", "GaussNoise", "GaussianBlur",
    "GlassBlur", "HueSaturationValue", "ISONoise", "Illumination", "ImageCompression", "InvertImg", "MedianBlur",
    "MotionBlur", "MultiplicativeNoise", "PlanckianJitter", "PlasmaBrightnessContrast", "PlasmaShadow", "Posterize",
    "RGBShift", "RandomBrightnessContrast", "RandomFog", "RandomGamma", "RandomGravel", "RandomRain", "RandomShadow",
    "RandomSnow", "RandomSunFlare", "RandomToneCurve", "RingingOvershoot", "SaltAndPepper", "Sharpen", "ShotNoise",
    "Solarize", "Spatter", "Superpixels", "ToGray", "ToSepia", "UnsharpMask", "ZoomBlur",
)  # fmt: skip


def transform_of(text: str) -> tuple[str, dict[str, Any]]:
    """Return class and parameters of an entry of ``albumentations``, such as ``Blur blur_limit=[3,5] p=0.1``.

    Raises:
        ConfigError: the class is not in ``TRANSFORMS``, or a parameter is not name=value.
    """
    name, *pairs = text.split() or [""]
    if name not in TRANSFORMS:
        raise ConfigError(
            f"albumentations: {shown(name)} is not a transform that a recipe may have",
            hint=did_you_mean(name, TRANSFORMS) or f"one of {', '.join(TRANSFORMS)}",
        )
    parameters = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        parsed = read_scalar(value, f"albumentations: {text}") if key.isidentifier() and value else None
        parts = parsed if isinstance(parsed, list) else [parsed]
        if not equals or not all(isinstance(part, (bool, int, float, str)) for part in parts):
            raise ConfigError(
                f"albumentations: {shown(pair)} in {shown(text)} is not a parameter",
                hint="write name=value without spaces, such as Blur blur_limit=[3,5] p=0.1",
            )
        parameters[key] = tuple(parts) if isinstance(parsed, list) else parsed
    return name, parameters
