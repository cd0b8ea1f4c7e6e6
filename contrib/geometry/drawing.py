"""Black lines, circles and digits on a small white canvas, and its PNG file.

Integer arithmetic and a PNG without compression: the same calls give the same bytes, and so the same digest, on all
machines and library versions.
"""

from __future__ import annotations

import struct
import zlib
from math import isqrt

import numpy as np
from numpy.typing import NDArray

GLYPH_WIDTH, GLYPH_HEIGHT = 5, 7
ADVANCE = GLYPH_WIDTH + 3
"""Pixels from one character of a label to the next."""

_ROWS = {
    "0": (0b01110, 0b10001, 0b10011, 0b10101, 0b11001, 0b10001, 0b01110),
    "1": (0b00100, 0b01100, 0b00100, 0b00100, 0b00100, 0b00100, 0b01110),
    "2": (0b01110, 0b10001, 0b00001, 0b00010, 0b00100, 0b01000, 0b11111),
    "3": (0b11111, 0b00010, 0b00100, 0b00010, 0b00001, 0b10001, 0b01110),
    "4": (0b00010, 0b00110, 0b01010, 0b10010, 0b11111, 0b00010, 0b00010),
    "5": (0b11111, 0b10000, 0b11110, 0b00001, 0b00001, 0b10001, 0b01110),
    "6": (0b00110, 0b01000, 0b10000, 0b11110, 0b10001, 0b10001, 0b01110),
    "7": (0b11111, 0b00001, 0b00010, 0b00100, 0b01000, 0b01000, 0b01000),
    "8": (0b01110, 0b10001, 0b10001, 0b01110, 0b10001, 0b10001, 0b01110),
    "9": (0b01110, 0b10001, 0b10001, 0b01111, 0b00001, 0b00010, 0b01100),
    "x": (0b00000, 0b00000, 0b10001, 0b01010, 0b00100, 0b01010, 0b10001),
}
GLYPHS = {
    char: np.array([[bool(row >> (GLYPH_WIDTH - 1 - column) & 1) for column in range(GLYPH_WIDTH)] for row in rows])
    for char, rows in _ROWS.items()
}
"""[row, column] of each character: true is black."""


class Canvas:
    """A white square; (0, 0) is its upper left pixel. Points outside are clipped."""

    def __init__(self, size: int) -> None:
        self.ink: NDArray[np.bool_] = np.zeros((size, size), dtype=bool)
        self.labels: list[tuple[str, int, int]] = []
        """Text of each label, and the center pixel of its first character."""

    @property
    def glyphs(self) -> list[tuple[str, int, int]]:
        """Each character of the labels, and its center pixel."""
        return [(char, x + ADVANCE * i, y) for text, x, y in self.labels for i, char in enumerate(text)]

    def line(self, start: tuple[int, int], end: tuple[int, int]) -> None:
        """Draw a line, including both ends."""
        (x0, y0), (x1, y1) = start, end
        steps = max(abs(x1 - x0), abs(y1 - y0), 1)
        along = np.arange(steps + 1)
        self._dot(x0 + _nearest(along * (x1 - x0), steps), y0 + _nearest(along * (y1 - y0), steps))

    def circle(self, center: tuple[int, int], radius: int) -> None:
        y, x = np.ogrid[: len(self.ink), : len(self.ink)]
        squared = (x - center[0]) ** 2 + (y - center[1]) ** 2
        self.ink |= (squared >= radius * radius - radius) & (squared <= radius * radius + radius)

    def write(self, corner: tuple[int, int], text: str) -> None:
        """Write digits and x on white, from the upper left corner. Raises: ValueError if they do not fit."""
        x, y = corner
        width, last = ADVANCE * (len(text) - 1) + GLYPH_WIDTH, len(self.ink)
        if min(x, y) < 0 or x + width > last or y + GLYPH_HEIGHT > last:
            raise ValueError(f"{text!r} at {corner} does not fit on a canvas of {last} pixels")
        self.ink[max(0, y - 1) : y + GLYPH_HEIGHT + 1, max(0, x - 1) : x + width + 1] = False
        self.labels.append((text, x + GLYPH_WIDTH // 2, y + GLYPH_HEIGHT // 2))
        for char in text:
            self.ink[y : y + GLYPH_HEIGHT, x : x + GLYPH_WIDTH] = GLYPHS[char]
            x += ADVANCE

    def png(self, scale: int = 1) -> bytes:
        """The PNG file, one bit per pixel; each pixel becomes `scale` x `scale` pixels."""
        return png(np.kron(self.ink, np.ones((scale, scale), dtype=bool)) if scale > 1 else self.ink)

    def _dot(self, x: NDArray[np.int64], y: NDArray[np.int64]) -> None:
        inside = (x >= 0) & (x < len(self.ink)) & (y >= 0) & (y < len(self.ink))
        self.ink[y[inside], x[inside]] = True


def toward(center: tuple[int, int], direction: tuple[int, int], length: int) -> tuple[int, int]:
    """The pixel at this distance from the center."""
    dx, dy = direction
    norm = isqrt((dx * dx + dy * dy) << 16)
    return tuple(c + _nearest_int(d * length << 8, norm) for c, d in zip(center, direction, strict=True))  # type: ignore[return-value]


def png(ink: NDArray[np.bool_]) -> bytes:
    """A black and white PNG; true is black."""
    height, width = ink.shape
    rows = np.packbits(~ink, axis=1)
    # A filter byte of 0 before each row.
    data = np.concatenate([np.zeros((height, 1), dtype=np.uint8), rows], axis=1).tobytes()
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", _stored(data)) + _chunk(b"IEND", b"")


def _stored(data: bytes) -> bytes:
    """A zlib stream without compression: its bytes do not depend on the version of zlib."""
    most = 0xFFFF
    blocks = [data[start : start + most] for start in range(0, len(data), most)]
    body = b"".join(
        struct.pack("<BHH", index == len(blocks) - 1, len(block), len(block) ^ most) + block
        for index, block in enumerate(blocks)
    )
    return b"\x78\x01" + body + struct.pack(">I", zlib.adler32(data))


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _nearest(numerator: NDArray[np.int64], denominator: int) -> NDArray[np.int64]:
    return (2 * numerator + denominator) // (2 * denominator)


def _nearest_int(numerator: int, denominator: int) -> int:
    return (2 * numerator + denominator) // (2 * denominator)
