"""Bytes in a Huffman code: zlib's, without repetitions.

It spends at least one bit on a byte, so that nothing grows more than eightfold when it is read; what would is refused.
"""

import zlib


def coded(raw: bytes) -> bytes:
    """The code of these bytes.

    >>> zeros = coded(bytes(8000))
    >>> 1000 < len(zeros) < 1100, uncoded(zeros) == bytes(8000)
    (True, True)
    """
    coder = zlib.compressobj(level=9, memLevel=9, strategy=zlib.Z_HUFFMAN_ONLY)
    return coder.compress(raw) + coder.flush()


def uncoded(code: bytes) -> bytes:
    """The bytes again; a `ValueError` says what is wrong with a code that is not one."""
    decoder = zlib.decompressobj()
    try:
        raw = decoder.decompress(code, 8 * len(code))
    except zlib.error as error:
        raise ValueError(f"cannot be decoded ({error})") from error
    if not decoder.eof or decoder.unused_data:
        raise ValueError("is not one whole Huffman code")
    return raw
