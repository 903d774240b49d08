"""A step that asks for no logits: the last layer, of any kind, then runs over no rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import kvgraph
from kvgraph.contract.inputs import ModelInputs
from tests.runtime.test_onnxruntime_session import Rows

NONE = np.zeros(0, np.int32)


@pytest.mark.parametrize("backend", ["onnx", "torch"])
@pytest.mark.parametrize(
    ("model", "weights"),
    [
        ("tiny-llama", "int4"),
        ("gemma2", "float32"),
        ("gpt_oss", "float32"),
        ("gpt_oss", "int8"),
    ],
)
def test_keys_and_values_are_as_if_it_had_asked(
    backend: str, model: str, weights: str, compiled: Callable[..., Path]
) -> None:
    options = {} if weights == "float32" else {"weights": weights}
    session = kvgraph.load(compiled(model, backend=backend, **options)).session()
    asking, quiet = (Rows(session, [5, 3], 7) for _ in range(2))
    for rows, asks in ((asking, True), (quiet, False)):
        inputs, kv = rows.inputs()
        where = inputs.logits_indices if asks else NONE
        logits = session.run(ModelInputs(inputs.tokens, inputs.input_row_offsets, where), kv)
        assert logits.shape == (2 * asks, session.signature.outputs[0].shape[1])
    pools = [
        [
            np.asarray(value.handle)
            for value in rows.inputs()[1].flatten()
            if value.handle is not None
        ]
        for rows in (asking, quiet)
    ]
    for first, second in zip(*pools, strict=True):
        np.testing.assert_array_equal(first, second)
