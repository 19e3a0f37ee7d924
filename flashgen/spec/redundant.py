"""What a valid spec says in vain, or probably did not mean: one sentence each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from flashgen.spec.expr import Index, Meaning, Name, check_expression, parse_expression
from flashgen.spec.parts import Alibi, Bias, Causal, Expr, Input, Same, Window

if TYPE_CHECKING:
    from flashgen.spec.model import AttentionSpec

# The axes along which each symbol runs.
_AXES: dict[str, tuple[str, ...]] = {
    "b": ("batch",),
    "h": ("q_heads",),
    "hk": ("kv_heads",),
    "row": ("q_len",),
    "q": ("q_len", "kv_len"),
    "k": ("kv_len",),
}


def redundancies(spec: AttentionSpec) -> tuple[str, ...]:
    """The warnings of `spec`, in the order of its fields."""
    inputs = {declared.name: declared for declared in spec.inputs}
    meanings = _meanings(spec, inputs)
    return (
        *_mask_warnings(spec),
        *_expression_warnings(meanings, inputs),
        *_score_warnings(spec),
        *_input_warnings(spec, meanings),
        *_shape_warnings(spec),
    )


def _meanings(spec: AttentionSpec, inputs: dict[str, Input]) -> dict[str, Meaning]:
    found: dict[str, Meaning] = {}
    for place, item in enumerate(spec.mask):
        if isinstance(item, Expr):
            tree = parse_expression(item.expr)
            found[f"mask[{place}].expr"] = check_expression(tree, inputs, "mask")
    for place, step in enumerate(spec.score):
        if isinstance(step, Expr):
            tree = parse_expression(step.expr)
            found[f"score[{place}].expr"] = check_expression(tree, inputs, "score")
    return found


def _mask_warnings(spec: AttentionSpec) -> Iterator[str]:
    causal = Causal() in spec.mask
    for place, item in enumerate(spec.mask):
        first = spec.mask.index(item)
        if first < place:
            yield f"mask[{place}]: the same as mask[{first}]; it has no effect"
            continue
        if isinstance(item, Window):
            if causal and item.right:
                yield (
                    f"mask[{place}].window.right: {item.right} has no effect under causal, "
                    "which shows no key to the right; write right: 0"
                )
            for other_place, other in enumerate(spec.mask):
                if isinstance(other, Window) and other != item and _within(other, item):
                    yield (
                        f"mask[{place}]: the window of mask[{other_place}] lies within it; "
                        "it has no effect"
                    )
                    break


def _within(inner: Window, outer: Window) -> bool:
    return all(
        wide is None or (narrow is not None and narrow <= wide)
        for narrow, wide in ((inner.left, outer.left), (inner.right, outer.right))
    )


def _expression_warnings(meanings: dict[str, Meaning], inputs: dict[str, Input]) -> Iterator[str]:
    for field, meaning in meanings.items():
        if field.startswith("mask") and meaning.constant is not None:
            if meaning.constant:
                yield f"{field}: the condition is always true; it has no effect"
            else:
                yield f"{field}: the condition is always false; it hides every key"
        for read in meaning.reads:
            if isinstance(read, Index):
                yield from _axis_warnings(field, read, inputs[read.name])


def _axis_warnings(field: str, read: Index, declared: Input) -> Iterator[str]:
    for axis, (index, extent) in enumerate(zip(read.indices, declared.shape, strict=True)):
        if isinstance(index, Name) and index.name in _AXES and isinstance(extent, str):
            expected = _AXES[index.name]
            if extent not in expected:
                yield (
                    f"{field}: {read.name} is indexed with {index.name} along axis {axis}, which "
                    f"is {extent} long, not {' or '.join(expected)}"
                )


def _score_warnings(spec: AttentionSpec) -> Iterator[str]:
    for place, item in enumerate(spec.score):
        first = spec.score.index(item)
        if first < place and not isinstance(item, Expr):
            yield f"score[{place}]: the same as score[{first}]; it is applied again"
        if isinstance(item, Bias) and item.grad and not spec.backward:
            yield f"score[{place}].bias.grad: no gradient is computed, because backward is false"


def _input_warnings(spec: AttentionSpec, meanings: dict[str, Meaning]) -> Iterator[str]:
    used = {read.name for meaning in meanings.values() for read in meaning.reads}
    used |= {item.input for item in spec.mask if isinstance(item, Same)}
    used |= {item.input for item in spec.score if isinstance(item, Alibi)}
    used |= {item.tensor for item in spec.score if isinstance(item, Bias)}
    for declared in spec.inputs:
        if declared.name not in used:
            yield (
                f"inputs.{declared.name}: neither mask nor score reads it; "
                "a call must still pass it"
            )


def _shape_warnings(spec: AttentionSpec) -> Iterator[str]:
    for shape, times in Counter(spec.shapes).items():
        if times > 1:
            yield f"shapes[{spec.shapes.index(shape)}]: there {times} times; once is enough"
