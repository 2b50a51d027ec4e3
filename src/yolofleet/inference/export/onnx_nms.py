"""Append non-maximum suppression (NMS) to an ONNX graph, with operations of opset 17.

N images, K predictions of an image, C classes, M boxes that ``NonMaxSuppression`` keeps, D = max_det.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from yolofleet.inference.export.export_metadata import BOXES, DECODED, Suppression


def append_suppression(model: Any, nms: Suppression) -> None:
    """Replace the output ``decoded`` by ``boxes`` [N, D, 6], see ``export_metadata.COMPUTES``; in place.

    The result is that of ``data.geometry.nms.detections`` with ``multi_label=False``: each prediction counts for its best class.
    """
    import onnx
    from onnx import helper

    graph = _Writer(model.graph)
    i64, f32 = np.int64, np.float32

    cxcywh = graph("Slice", DECODED, *graph.numbers([0], [4], [2]))  # [N, K, 4]
    objectness = graph("Slice", DECODED, *graph.numbers([4], [5], [2]))  # [N, K, 1]
    classes = graph("Slice", DECODED, *graph.numbers([5], [2**31], [2]))  # [N, K, C]
    scores = graph("Mul", objectness, classes)
    best = graph("ReduceMax", scores, axes=[2], keepdims=1)  # [N, K, 1]
    best_class = graph("ArgMax", scores, axis=2, keepdims=0)  # [N, K]
    class_scores = (
        best if nms.agnostic else graph("Where", graph("Less", scores, best), graph.number(0, f32), scores)
    )
    kept = graph(  # [M, 3] image, class, prediction
        "NonMaxSuppression",
        cxcywh,
        graph("Transpose", class_scores, perm=[0, 2, 1]),
        graph.number([nms.max_det], i64),
        graph.number([nms.iou], f32),
        graph.number([nms.conf], f32),
        center_point_box=1,
    )
    where = graph("Gather", kept, graph.number([0, 2], i64), axis=1)  # [M, 2] image, prediction
    score = graph("GatherND", graph("Squeeze", best, graph.number([2], i64)), where)  # [M]
    found = graph("GatherND", cxcywh, where)  # [M, 4]
    centre = graph("Slice", found, *graph.numbers([0], [2], [1]))
    half = graph("Mul", graph("Slice", found, *graph.numbers([2], [4], [1])), graph.number(0.5, f32))
    column = graph.number([1], i64)
    rows = graph(  # [M, 6]
        "Concat",
        graph("Sub", centre, half),
        graph("Add", centre, half),
        graph("Unsqueeze", score, column),
        graph(
            "Unsqueeze",
            graph("Cast", graph("GatherND", best_class, where), to=onnx.TensorProto.FLOAT),
            column,
        ),
        axis=1,
    )
    image = graph("Squeeze", graph("Slice", where, *graph.numbers([0], [1], [1])), column)  # [M]

    _, order = graph.several("TopK", 2, score, graph("Shape", score), largest=1, sorted=1)
    rows, image = graph("Gather", rows, order, axis=0), graph("Gather", image, order, axis=0)

    # The slot of a row is its rank in its image. Rows beyond D go to slot D, which the last Slice removes.
    count = graph("Shape", DECODED, start=0, end=1)  # [1] N
    images = graph("Range", graph.number(0, i64), graph("Squeeze", count), graph.number(1, i64))  # [N]
    is_of = graph(
        "Equal", graph("Unsqueeze", images, column), graph("Unsqueeze", image, graph.number([0], i64))
    )
    is_of = graph("Cast", is_of, to=onnx.TensorProto.INT64)  # [N, M]
    before = graph("CumSum", is_of, graph.number(1, i64), exclusive=1)
    slot = graph("ReduceSum", graph("Mul", before, is_of), graph.number([0], i64), keepdims=0)  # [M]
    slot = graph("Min", slot, graph.number(nms.max_det, i64))
    target = graph(
        "Concat", graph("Unsqueeze", image, column), graph("Unsqueeze", slot, column), axis=1
    )  # [M, 2]
    empty = graph(
        "ConstantOfShape",
        graph("Concat", count, graph.number([nms.max_det + 1, 6], i64), axis=0),
        value=helper.make_tensor("zero", onnx.TensorProto.FLOAT, [1], [0.0]),
    )
    filled = graph("ScatterND", empty, target, rows)
    graph("Slice", filled, *graph.numbers([0], [nms.max_det], [1]), output=BOXES)

    shape = model.graph.output[0].type.tensor_type.shape.dim[0]
    images_dim = shape.dim_param or shape.dim_value
    del model.graph.output[:]
    model.graph.output.append(
        helper.make_tensor_value_info(BOXES, onnx.TensorProto.FLOAT, [images_dim, nms.max_det, 6])
    )


class _Writer:
    """Adds nodes to a graph; a call returns the name of the new node's output."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self.count = 0

    def __call__(self, kind: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        return self._add(kind, inputs, [output or self._name()], attributes)[0]

    def several(self, kind: str, outputs: int, *inputs: str, **attributes: Any) -> list[str]:
        return self._add(kind, inputs, [self._name() for _ in range(outputs)], attributes)

    def number(self, value: Any, kind: Any) -> str:
        """Add a constant and return its name."""
        from onnx import numpy_helper

        name = self._name()
        self.graph.initializer.append(numpy_helper.from_array(np.array(value, kind), name))
        return name

    def numbers(self, *values: list[int]) -> list[str]:
        """Add constant lists of int64 and return their names."""
        return [self.number(value, np.int64) for value in values]

    def _name(self) -> str:
        self.count += 1
        return f"nms_{self.count}"

    def _add(
        self, kind: str, inputs: tuple[str, ...], outputs: list[str], attributes: dict[str, Any]
    ) -> list[str]:
        from onnx import helper

        self.graph.node.append(
            helper.make_node(kind, inputs, outputs, name=f"nms/{outputs[0]}", **attributes)
        )
        return outputs
