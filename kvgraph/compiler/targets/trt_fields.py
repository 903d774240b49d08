"""What TensorRT's plugins are given besides an op's attributes: the fields of plugins/tensorrt/.

`kernels` is a record of `kvgraph/kernels/record.py`; `images` holds cubins by SHA-256. Equal cubins
of an engine travel once, in the first node.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

IMAGE_HEADER = struct.Struct("<32sQ")


def pack_images(images: Iterable[bytes]) -> bytes:
    """The field `images`: for each its SHA-256, its size (u64, little-endian) and its bytes."""
    return b"".join(
        IMAGE_HEADER.pack(hashlib.sha256(image).digest(), len(image)) + image for image in images
    )
