"""JPEG files and their pixels: the decoders that there are, and what a file must be before it is packed.

| decoder     | images/s of one core: Imagenette, 224 px | Tiny-ImageNet, 64 px |
|-------------|------------------------------------------|----------------------|
| simplejpeg  | 3,700                                    | 18,100               |
| torchvision | 2,700                                    | 10,200               |
| pillow      | 1,700                                    | 4,200                |

CPU time on a busy AMD EPYC, `benchmarks/decoders.py`. All three gave the same pixels for all images of both, but other
versions of them may round otherwise: record `decoder_version` with what was trained on their pixels.
"""

import io
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import version
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from rewound.foundations.errors import InputError
from rewound.foundations.names import optional, unknown

Data = bytes | memoryview
Pixels = npt.NDArray[np.uint8]  # (height, width, 3), RGB
Decoder = Callable[[Data, Pixels], None]

INSTALL: Final = "`pip install 'rewound[imagenet]'`"
_MOST_PIXELS = 2**27  # of a picture; no file of ImageNet comes near, and a damaged header may say anything


class Unreadable(ValueError):
    """A file that is no whole picture."""


class Checked(NamedTuple):
    """A JPEG file in grey or colours that decodes without an error, and how it differs from what was given."""

    jpeg: bytes
    height: int
    width: int
    grey: bool
    change: str | None


def decoders() -> tuple[str, ...]:
    """The decoders that are installed, the fastest first."""
    return tuple(name for name in _DECODERS if _installed(name))


def fastest_decoder() -> str:
    """The fastest decoder that is installed; an error if none is."""
    if not (found := decoders()):
        raise InputError(f"a decoder of JPEG files is not installed: {INSTALL}")
    return found[0]


def check_decoder(name: str) -> None:
    """An error unless there is a decoder of that name, and it is installed.

    >>> check_decoder("jpeg2000")
    Traceback (most recent call last):
    rewound.foundations.errors.InputError: unknown decoder 'jpeg2000' (known: pillow, simplejpeg, torchvision)
    """
    if name not in _DECODERS:
        raise InputError(unknown("decoder", name, _DECODERS))
    if not _installed(name):
        raise InputError(f"the decoder {name} is not installed: {INSTALL}")


def decoder_version(name: str) -> str:
    """The decoder with the versions that decide its pixels, as it is recorded with results.

    >>> decoder_version("pillow").split()[0]
    'pillow'
    """
    library = ""
    if name == "pillow":
        features = _module("PIL.features")
        turbo = features.version("libjpeg_turbo")
        library = f" libjpeg-turbo {turbo}" if turbo else f" libjpeg {features.version('jpg')}"
    return f"{name} {version(name)}{library}"


@cache
def decoder(name: str) -> Decoder:
    """The function that writes the pixels of a JPEG file into an array of its height and width."""
    check_decoder(name)
    return _DECODERS[name]()


def checked(data: bytes) -> Checked:
    """The file as it is if all decoders give the same picture of it, else made anew as a JPEG of quality 100.

    Made anew, as in the authors' scripts: CMYK, which decoders turn into RGB in different ways; PNG and other formats
    under the name of a JPEG; files with errors that decoders pass over. So are those with a chroma subsampling, such as
    4:4:1, that simplejpeg does not know. Grey values of 16 bits become 8.
    """
    simplejpeg, odd = _module("simplejpeg"), "with errors that decoders pass over and that may leave parts grey"
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
        if colours in ("Gray", "YCbCr", "RGB"):
            _check_size(height, width)
            simplejpeg.decode_jpeg(data, "RGB", strict=True)
            return Checked(data, height, width, colours == "Gray", None)
    except Unreadable:
        raise
    except ValueError:
        pass
    except KeyError:  # it looks the subsampling up in a table
        odd = "with an unusual chroma subsampling"
    return _made_anew(data, odd)


def check_installed() -> None:
    """An error if a package is missing that `checked` needs."""
    for module in ("simplejpeg", "PIL.Image"):
        _module(module)


def _check_size(height: int, width: int) -> None:
    if height * width > _MOST_PIXELS:
        raise Unreadable(f"it says that it has {width} x {height} pixels")


def _made_anew(data: bytes, odd: str) -> Checked:
    image_module = _module("PIL.Image")
    try:
        with image_module.open(io.BytesIO(data), formats=["JPEG", "PNG", "GIF", "BMP", "WEBP"]) as image:
            _check_size(image.height, image.width)
            image.load()
            change = _change(image, odd)
            file = io.BytesIO()
            _in_colours(image).save(file, "JPEG", quality=100, subsampling=0)
            return Checked(file.getvalue(), image.height, image.width, False, change)
    except Unreadable:
        raise
    except Exception as error:  # Pillow raises a dozen types for damaged input
        reason = "it is no picture" if type(error).__name__ == "UnidentifiedImageError" else str(error)
        raise Unreadable(reason) from error


def _change(image: Any, odd: str) -> str:
    if image.format not in ("JPEG", "MPO"):
        return f"stored as {image.format}{' with 16 bits' * _is_deep(image)}"
    return "in CMYK" if image.mode == "CMYK" else odd


def _in_colours(image: Any) -> Any:
    """The image in RGB; Pillow itself would cut grey values of more than 8 bits off at 255, so that all become white.

    >>> deep = _module("PIL.Image").fromarray(np.array([[0, 257, 65535]], np.uint16))
    >>> [red for red, _, _ in np.asarray(_in_colours(deep))[0].tolist()]
    [0, 1, 255]
    """
    if not _is_deep(image):
        return image.convert("RGB")
    values = np.asarray(image)
    if image.mode == "F" or values.min() < 0 or values.max() > 65535:
        raise Unreadable(f"its grey values go from {values.min():g} to {values.max():g}, and not from 0 to 65535")
    return _module("PIL.Image").fromarray((values // 257).astype(np.uint8)).convert("RGB")


def _is_deep(image: Any) -> bool:
    return str(image.mode)[0] in "IF"  # I;16 and I are whole numbers, F are others


def _module(name: str) -> Any:
    package = "pillow" if name.startswith("PIL") else name
    return optional(name, f"pictures need {package}, which is not installed: {INSTALL}")


def _installed(name: str) -> bool:
    try:
        _DECODERS[name]()
    except (InputError, RuntimeError, OSError):  # torchvision for another torch fails when it is imported
        return False
    return True


def _simplejpeg() -> Decoder:
    decode = _module("simplejpeg").decode_jpeg

    def into(data: Data, pixels: Pixels) -> None:
        decode(data, "RGB", buffer=pixels, strict=True)

    return into


def _torchvision() -> Decoder:
    io, torch = _module("torchvision.io"), _module("torch")

    def into(data: Data, pixels: Pixels) -> None:
        file = torch.from_numpy(np.frombuffer(data, np.uint8).copy())  # it takes no tensor that must not be written to
        pixels[:] = io.decode_jpeg(file, io.ImageReadMode.RGB).permute(1, 2, 0).numpy()

    return into


def _pillow() -> Decoder:
    image_module = _module("PIL.Image")

    def into(data: Data, pixels: Pixels) -> None:
        with image_module.open(io.BytesIO(data), formats=["JPEG"]) as image:
            pixels[:] = np.asarray(image if image.mode == "RGB" else image.convert("RGB"))

    return into


_DECODERS: Final[Mapping[str, Callable[[], Decoder]]] = {
    "simplejpeg": _simplejpeg,
    "torchvision": _torchvision,
    "pillow": _pillow,
}
