"""The fields of TensorRT plugins (plugins/tensorrt/) besides an op's attributes.

`kernels` is a record of `kvgraph/kernels/record.py`. `images` holds cubins by SHA-256. An engine
has equal cubins once, in the first node that needs them.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

IMAGE_HEADER = struct.Struct("<32sQ")


def pack_images(images: Iterable[bytes]) -> bytes:
    """The field `images`: SHA-256, size (u64, little-endian) and bytes of each image."""
    return b"".join(
        IMAGE_HEADER.pack(hashlib.sha256(image).digest(), len(image)) + image for image in images
    )
