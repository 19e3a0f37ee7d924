"""A document -> the canonical fields of a spec, with every fault that it has.

This is the one statement of what a spec may say; YAML and Python go through it alike. A reader
method returns None after reporting a fault, so that each fault is said once and the rest of the
document is still read.
"""

from __future__ import annotations

import difflib
import keyword
import re
from collections.abc import Callable, Mapping, Sequence

from flashgen.dtypes import DTYPES, INPUT_DTYPES, MATMUL_DTYPES, OUTPUT_DTYPES, output_dtype
from flashgen.spec.document import (
    Fault,
    Located,
    Mapped,
    Place,
    Problems,
    describe,
    word,
)
from flashgen.spec.expr import (
    ExpressionError,
    check_expression,
    parse_expression,
    unparse,
)
from flashgen.spec.parts import (
    ALIGNS,
    CALL_ARGUMENTS,
    EXTENTS,
    FUNCTIONS,
    INPUT_NAME_PATTERN,
    KV_LENS,
    LAYOUTS,
    LOOP_ORDERS,
    MAX_DESCRIPTION,
    MAX_EXTENT,
    MAX_GROUP,
    MAX_HEAD_DIM,
    MAX_INPUT_NAME,
    MAX_INPUT_RANK,
    MAX_ITEMS,
    MAX_NAME,
    MAX_NUMBER,
    MAX_PAGE_SIZE,
    MAX_SHAPES,
    MIN_NUMBER,
    NAME_PATTERN,
    SHAPE_FIELDS,
    SHAPE_LIMITS,
    SINKS,
    SPEC_VERSION,
    SYMBOLS,
    Alibi,
    Bias,
    Causal,
    DTypes,
    Expr,
    HeadDim,
    Heads,
    Input,
    MaskItem,
    Paged,
    Same,
    ScoreItem,
    Shape,
    Softcap,
    Window,
)

FIELDS: tuple[str, ...] = (
    "flashgen",
    "name",
    "description",
    "head_dim",
    "dtype",
    "heads",
    "scale",
    "mask",
    "align",
    "score",
    "inputs",
    "sink",
    "kv_lens",
    "kv_cache",
    "layout",
    "dropout",
    "loop_order",
    "backward",
    "deterministic",
    "shapes",
)
REQUIRED_IN_YAML: tuple[str, ...] = ("flashgen", "name", "head_dim", "dtype")
REQUIRED_IN_PYTHON: tuple[str, ...] = ("head_dim", "dtype")

_MISSING = {"flashgen": f"write 'flashgen: {SPEC_VERSION}' in the first line"}

# What people write at top level, and where it belongs.
_ELSEWHERE = {
    "causal": "write 'mask: causal'",
    "is_causal": "write 'mask: causal'",
    "window": "write 'mask: {window: {left: …, right: …}}'",
    "sliding_window": "write 'mask: {window: {left: …, right: 0}}'",
    "window_size": "write 'mask: {window: {left: …, right: …}}'",
    "softcap": "write 'score: {softcap: …}'",
    "logit_softcap": "write 'score: {softcap: …}'",
    "alibi": "write 'score: {alibi: …}' and declare the slopes under inputs",
    "bias": "write 'score: {bias: {tensor: …}}' and declare the tensor under inputs",
    "group": "write 'heads: {group: …}'",
    "softmax_scale": "the field is called 'scale'",
    "sinks": "write 'sink: per_head'",
    "page_size": "write 'kv_cache: {paged: {page_size: …}}'",
    "paged": "write 'kv_cache: {paged: {page_size: …}}'",
    "version": "the version of the spec language is called 'flashgen'",
    "head_size": "the field is called 'head_dim'",
    "batch": "sizes go under 'shapes'",
    "q_heads": "sizes go under 'shapes'",
    "kv_heads": "sizes go under 'shapes'",
    "q_len": "sizes go under 'shapes'",
    "kv_len": "sizes go under 'shapes'",
}


class Reader:
    """Reads one document; `problems` fills on the way."""

    def __init__(self, problems: Problems) -> None:
        self.problems = problems
        self.inputs: dict[str, Input | None] = {}

    # -- values ------------------------------------------------------------------------------------

    def sound(self, node: Located, field: str) -> bool:
        """Whether the value can be used at all; if not, says why."""
        if isinstance(node.value, Fault):
            self.problems.add(node.place, field, node.value.message, node.value.hint)
            return False
        return True

    def wrong(self, node: Located, field: str, expected: str, hint: str | None = None) -> None:
        message = f"got {describe(node.value)}, expected {expected}"
        if node.value is None:
            hint = "write a value, or leave the field out"
        self.problems.add(node.place, field, message, hint)

    def integer(
        self, node: Located, field: str, low: int, high: int, hint: str | None = None
    ) -> int | None:
        if not self.sound(node, field):
            return None
        value = node.value
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return value
        expected = f"an integer from {low} to {high}"
        self.wrong(node, field, expected, hint or _number_hint(value))
        return None

    def number(
        self, node: Located, field: str, expected: str, least: float = MIN_NUMBER
    ) -> float | None:
        """0, or a number of a size that fp32 can compute with, as a float; -0.0 counts as 0.0."""
        if not self.sound(node, field):
            return None
        value = node.value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.wrong(node, field, expected, _number_hint(value))
            return None
        if value != 0 and not least <= abs(value) <= MAX_NUMBER:  # NaN compares false
            sizes = f"{least:g} to {MAX_NUMBER:g}"
            self.wrong(node, field, f"a number of a size that fp32 can compute with, {sizes}")
            return None
        return float(value) or 0.0

    def boolean(self, node: Located, field: str) -> bool | None:
        if not self.sound(node, field):
            return None
        if isinstance(node.value, bool):
            return node.value
        hint = None
        if isinstance(node.value, str) and node.value.lower() in {"true", "false"}:
            hint = "remove the quotes"
        self.wrong(node, field, "true or false", hint)
        return None

    def choice(
        self, node: Located, field: str, choices: Sequence[str], hint: str | None = None
    ) -> str | None:
        if isinstance(node.value, Fault):  # what it is instead does not matter here
            self.problems.add(
                node.place, field, node.value.message, f"write {_listed(choices)} here"
            )
            return None
        if isinstance(node.value, str) and node.value in choices:
            return node.value
        self.wrong(node, field, _listed(choices), hint or _did_you_mean(node.value, choices))
        return None

    def text(self, node: Located, field: str, expected: str) -> str | None:
        if not self.sound(node, field):
            return None
        if isinstance(node.value, str):
            return node.value
        hint = "put it in quotes" if isinstance(node.value, (bool, int, float)) else None
        self.wrong(node, field, expected, hint)
        return None

    def mapping(
        self,
        node: Located,
        field: str,
        expected: str,
        known: Sequence[str] | None,
        required: Sequence[str] = (),
    ) -> Mapping[str, Located] | None:
        """The entries of a mapping; `known` None: any names."""
        if not self.sound(node, field):
            return None
        if not isinstance(node.value, Mapped):
            self.wrong(node, field, expected)
            return None
        prefix = f"{field}." if field else ""
        for duplicate in node.value.duplicates:
            where = f"first at line {duplicate.first.line}" if duplicate.first.line else ""
            self.problems.add(
                duplicate.place,
                prefix + word(duplicate.key),
                "the field is there twice" + (f", {where}" if where else ""),
                "keep one of them",
            )
        for place, fault in node.value.bad_keys:
            self.problems.add(place, field, fault.message, fault.hint)
        if known is not None:
            for key, entry in node.value.entries.items():
                if key not in known:
                    self.unknown_field(entry.place, prefix, key, known)
        for key in required:
            if key not in node.value.entries:
                hint = None if prefix else _MISSING.get(key)
                self.problems.add(node.place, prefix + key, "required field is missing", hint)
        return node.value.entries

    def unknown_field(self, place: Place, prefix: str, key: str, known: Sequence[str]) -> None:
        hint = _did_you_mean(key, known)
        if not prefix and key in _ELSEWHERE:
            hint = _ELSEWHERE[key]
        if key == "<<":
            hint = "merge keys are not part of the spec language; write the fields out"
        allowed = f"allowed: {', '.join(known)}"
        self.problems.add(place, prefix + word(key), "unknown field", hint or allowed)

    def items(self, node: Located, field: str, most: int) -> list[tuple[Located, str]]:
        """The items of a list, each with its path; one item needs no list."""
        if not self.sound(node, field):
            return []
        if not isinstance(node.value, tuple):
            return [(node, field)]
        if len(node.value) > most:
            self.wrong(node, field, f"at most {most} items")
            return []
        return [(item, f"{field}[{place}]") for place, item in enumerate(node.value)]

    def single(
        self, node: Located, field: str, kinds: Sequence[str], expected: str
    ) -> tuple[str, Located] | None:
        """The one entry of a mapping such as {softcap: 50.0}."""
        entries = self.mapping(node, field, expected, kinds)
        if entries is None:
            return None
        found = [key for key in entries if key in kinds]
        if len(entries) == 1 and found:
            return found[0], entries[found[0]]
        if len(found) > 1:
            self.problems.add(
                node.place,
                field,
                f"one item says one thing, got {' and '.join(found)}",
                "write each as an item of its own: - " + " - ".join(f"{key}: …" for key in found),
            )
        elif not entries and not self.has_key_faults(node):
            self.wrong(node, field, expected)
        return None

    @staticmethod
    def has_key_faults(node: Located) -> bool:
        return isinstance(node.value, Mapped) and bool(node.value.bad_keys)

    # -- fields ------------------------------------------------------------------------------------

    def version(self, node: Located, field: str) -> int | None:
        if not self.sound(node, field):
            return None
        if node.value == SPEC_VERSION and type(node.value) is int:
            return SPEC_VERSION
        self.wrong(
            node,
            field,
            f"{SPEC_VERSION}, the version of the spec language that this flashgen reads",
        )
        return None

    def name(self, node: Located, field: str) -> str | None:
        expected = (
            "lower-case letters, digits, '_', '-' and single dots, starting with a letter or digit"
        )
        value = self.text(node, field, f"a name: {expected}")
        if value is None:
            return None
        if len(value) > MAX_NAME:
            message = f"{len(value)} characters long, at most {MAX_NAME} are allowed"
            self.problems.add(node.place, field, message)
            return None
        if not re.fullmatch(NAME_PATTERN, value):
            likely = re.sub(r"\.\.+", ".", re.sub(r"[^a-z0-9_.-]+", "_", value.lower())).strip(
                "_.-"
            )
            hint = f"did you mean '{likely}'?" if re.fullmatch(NAME_PATTERN, likely) else None
            self.wrong(node, field, expected, hint)
            return None
        return value

    def description(self, node: Located, field: str) -> str | None:
        value = self.text(node, field, "text")
        if value is None:
            return None
        if len(value) > MAX_DESCRIPTION:
            message = f"{len(value)} characters long, at most {MAX_DESCRIPTION} are allowed"
            self.problems.add(node.place, field, message)
            return None
        for character in value:
            if character != "\n" and not character.isprintable():
                message = f"the character U+{ord(character):04X} is not printable"
                self.problems.add(node.place, field, message)
                return None
        return value

    def head_dim(self, node: Located, field: str) -> HeadDim | None:
        if isinstance(node.value, Mapped):
            entries = self.mapping(node, field, "", ("qk", "v"), ("qk", "v")) or {}
            sizes = {
                key: self.integer(entry, f"{field}.{key}", 1, MAX_HEAD_DIM)
                for key, entry in entries.items()
                if key in {"qk", "v"}
            }
            qk, v = sizes.get("qk"), sizes.get("v")
            return None if qk is None or v is None else HeadDim(qk, v)
        if isinstance(node.value, (str, tuple)):
            self.wrong(
                node,
                field,
                f"an integer from 1 to {MAX_HEAD_DIM}, or {{qk: …, v: …}}",
                _number_hint(node.value),
            )
            return None
        size = self.integer(node, field, 1, MAX_HEAD_DIM)
        return None if size is None else HeadDim(size, size)

    def dtype(self, node: Located, field: str) -> DTypes | None:
        """One name for all, or {q, kv, out}: kv follows q, and out is what q multiplies into."""
        if not isinstance(node.value, Mapped):
            q = self.choice(node, field, MATMUL_DTYPES)
            return None if q is None else DTypes(q, q, output_dtype(q))
        known = ("q", "kv", "out")
        entries = self.mapping(node, field, "", known, ("q",)) or {}
        chosen = {
            key: self.choice(entries[key], f"{field}.{key}", MATMUL_DTYPES)
            for key in ("q", "kv")
            if key in entries
        }
        if "out" in entries:
            hint = None
            if entries["out"].value == "tf32":
                hint = "tf32 is how fp32 is multiplied; in memory it is fp32"
            chosen["out"] = self.choice(entries["out"], f"{field}.out", OUTPUT_DTYPES, hint)
        q = chosen.get("q")
        if q is None or None in chosen.values():
            return None
        return DTypes(q, chosen.get("kv") or q, chosen.get("out") or output_dtype(q))

    def heads(self, node: Located, field: str) -> Heads | None:
        if node.value == "any":
            return Heads()
        expected = "any, or {group: query heads per K/V head}"
        if isinstance(node.value, int) and not isinstance(node.value, bool):
            self.wrong(node, field, expected, "write {group: …} for query heads per K/V head")
            return None
        entries = self.mapping(node, field, expected, ("group",), ("group",))
        if entries is None or "group" not in entries:
            return None
        if entries["group"].value == "any":
            return Heads()
        group = self.integer(entries["group"], f"{field}.group", 1, MAX_GROUP)
        return None if group is None else Heads(group)

    def scale(self, node: Located, field: str) -> float | None:
        if node.value == "auto":
            return None
        return self.number(node, field, "a number, or auto (1/sqrt(head_dim.qk))")

    def dropout(self, node: Located, field: str) -> float | None:
        value = self.number(node, field, "a probability from 0 to below 1", least=0.0)
        if value is not None and not 0 <= value < 1:
            self.wrong(node, field, "a probability from 0 to below 1")
            return None
        return value

    def kv_cache(self, node: Located, field: str) -> str | Paged | None:
        if node.value == "contiguous":
            return "contiguous"
        expected = "contiguous, or {paged: {page_size: …}}"
        if isinstance(node.value, str):
            hint = _did_you_mean(node.value, ("contiguous", "paged"))
            if node.value == "paged":
                hint = "a paged cache needs its page size: {paged: {page_size: 16}}"
            self.wrong(node, field, expected, hint)
            return None
        found = self.single(node, field, ("paged",), expected)
        if found is None:
            return None
        entry, path = found[1], f"{field}.paged"
        entries = self.mapping(
            entry, path, "{page_size: …}, in keys", ("page_size",), ("page_size",)
        )
        if entries is None or "page_size" not in entries:
            return None
        size = self.integer(entries["page_size"], f"{path}.page_size", 1, MAX_PAGE_SIZE)
        return None if size is None else Paged(size)

    # -- inputs ------------------------------------------------------------------------------------

    def read_inputs(self, node: Located, field: str) -> tuple[Input, ...]:
        entries = self.mapping(node, field, "a mapping from names to {shape, dtype}", None)
        if entries is None:
            return ()
        if len(entries) > MAX_ITEMS:
            self.wrong(node, field, f"at most {MAX_ITEMS} inputs")
            return ()
        for name, entry in entries.items():
            path = f"{field}.{word(name)}"
            valid = self.input_name(name, entry.place, path)
            declared = self.read_input(name, entry, path)
            self.inputs[name] = declared if valid else None
        return tuple(
            declared for _, declared in sorted(self.inputs.items()) if declared is not None
        )

    def input_name(self, name: str, place: Place, path: str) -> bool:
        message, hint = None, None
        if not re.fullmatch(INPUT_NAME_PATTERN, name) or len(name) > MAX_INPUT_NAME:
            message = (
                "an input's name is made of ASCII letters, digits and '_', starts with a letter "
                f"and has at most {MAX_INPUT_NAME} characters"
            )
        elif keyword.iskeyword(name):
            message = "a keyword of Python cannot name an input, which is passed by keyword"
        elif name in FUNCTIONS or name in {"true", "false"}:
            message = f"'{name}' is reserved for expressions"
        elif name in SYMBOLS:
            message = f"'{name}' is a symbol of expressions and cannot name an input"
        elif name in CALL_ARGUMENTS:
            message = f"'{name}' is an argument of every kernel's call and cannot name an input"
            hint = {"sink": "write 'sink: per_head'", "kv_lens": "write 'kv_lens: per_batch'"}.get(
                name
            )
        if message is None:
            return True
        self.problems.add(place, path, message, hint or "choose another name")
        return False

    def read_input(self, name: str, node: Located, path: str) -> Input | None:
        known = ("shape", "dtype")
        entries = self.mapping(node, path, "{shape: […], dtype: …}", known, known)
        if entries is None:
            return None
        shape = self.shape(entries["shape"], f"{path}.shape") if "shape" in entries else None
        dtype = None
        if "dtype" in entries:
            dtype = self.choice(entries["dtype"], f"{path}.dtype", INPUT_DTYPES)
        return None if shape is None or dtype is None else Input(name, shape, dtype)

    def shape(self, node: Located, field: str) -> tuple[int | str, ...] | None:
        expected = f"a list of sizes, each a number or one of {', '.join(EXTENTS)}"
        if not self.sound(node, field):
            return None
        if not isinstance(node.value, tuple):
            self.wrong(node, field, expected, "a run-time scalar has the shape []")
            return None
        if len(node.value) > MAX_INPUT_RANK:
            self.wrong(node, field, f"at most {MAX_INPUT_RANK} axes")
            return None
        sizes = [self.extent(item, f"{field}[{place}]") for place, item in enumerate(node.value)]
        known = tuple(size for size in sizes if size is not None)
        return known if len(known) == len(sizes) else None

    def extent(self, node: Located, field: str) -> int | str | None:
        if isinstance(node.value, str):
            if node.value in EXTENTS:
                return node.value
            expected = f"a number, or one of {', '.join(EXTENTS)}"
            self.wrong(node, field, expected, _did_you_mean(node.value, EXTENTS))
            return None
        return self.integer(node, field, 1, MAX_EXTENT)

    def used_input(self, node: Located, field: str) -> tuple[str | None, Input | None]:
        """The name of a declared input, and the input if its declaration is sound."""
        name = self.text(node, field, "the name of a declared input")
        if name is None:
            return None, None
        if name not in self.inputs:
            hint = _did_you_mean(name, list(self.inputs))
            quoted = f"'{name}'" if word(name) == name else word(name)
            declare = f"declare it under inputs: {{{name}: {{shape: […], dtype: …}}}}"
            if not re.fullmatch(INPUT_NAME_PATTERN, name):
                declare = "declare it under inputs"
            self.problems.add(
                node.place, field, f"{quoted} is not a declared input", hint or declare
            )
            return None, None
        return name, self.inputs[name]

    # -- mask and score ----------------------------------------------------------------------------

    def mask(self, node: Located, field: str) -> tuple[MaskItem, ...]:
        read = [self.mask_item(item, path) for item, path in self.items(node, field, MAX_ITEMS)]
        return tuple(item for item in read if item is not None)

    def mask_item(self, node: Located, field: str) -> MaskItem | None:  # noqa: PLR0911 - one return for each kind
        kinds = ("causal", "window", "same", "expr")
        expected = "causal, {window: {left, right}}, {same: input} or {expr: condition}"
        if node.value == "causal":
            return Causal()
        if isinstance(node.value, str):
            hint = _did_you_mean(node.value, kinds)
            if node.value in {"none", "full"}:
                hint = "leave the field out: without a mask every key is visible"
            elif node.value in kinds:
                hint = f"'{node.value}' needs a value: {{{node.value}: …}}"
            elif re.search(r"[<>=\[]", node.value):
                hint = "write an expression as {expr: …}"
            elif "," in node.value:
                hint = "write a list of items: [causal, {window: …}]"
            self.wrong(node, field, expected, hint)
            return None
        if isinstance(node.value, Mapped) and "causal" in node.value.entries:
            place = node.value.entries["causal"].place
            self.problems.add(place, field, "causal takes no value", "write the bare word 'causal'")
            return None
        found = self.single(node, field, kinds, expected)
        if found is None:
            return None
        kind, entry = found
        path = f"{field}.{kind}"
        if kind == "window":
            return self.window(entry, path)
        if kind == "same":
            return self.same(entry, path)
        return self.expression(entry, path, "mask")

    def window(self, node: Located, field: str) -> Window | None:
        sides = ("left", "right")
        expected = "{left: …, right: …}, the keys to see on each side"
        if isinstance(node.value, int) and not isinstance(node.value, bool):
            self.wrong(node, field, expected, _window_hint(node.value))
            return None
        entries = self.mapping(node, field, expected, sides)
        if entries is None:
            return None
        given = {
            side: self.integer(
                entries[side], f"{field}.{side}", 0, MAX_EXTENT, _side_hint(side, entries[side])
            )
            for side in sides
            if side in entries
        }
        if not given:
            if not self.has_key_faults(node):
                self.problems.add(
                    node.place,
                    field,
                    "a window needs left, right, or both",
                    "left: n shows the n keys before the query's own position",
                )
            return None
        if None in given.values():
            return None
        return Window(given.get("left"), given.get("right"))

    def same(self, node: Located, field: str) -> Same | None:
        name, declared = self.used_input(node, field)
        if name is None:
            return None
        if declared is not None:
            shapes = (("kv_len",), ("batch", "kv_len"), (1, "kv_len"))
            if declared.shape not in shapes:
                self.problems.add(
                    node.place,
                    field,
                    f"'{name}' has shape {_shown(declared.shape)}, "
                    "expected [kv_len] or [batch, kv_len]",
                    "it is read at the query's position and at the key's",
                )
                return None
            if DTYPES[declared.dtype].kind != "integer":
                self.problems.add(
                    node.place, field, f"'{name}' is {declared.dtype}, expected int32 or int64"
                )
                return None
        return Same(name)

    def score(self, node: Located, field: str) -> tuple[ScoreItem, ...]:
        read = [self.score_item(item, path) for item, path in self.items(node, field, MAX_ITEMS)]
        return tuple(item for item in read if item is not None)

    def score_item(self, node: Located, field: str) -> ScoreItem | None:
        kinds = ("softcap", "alibi", "bias", "expr")
        expected = "{softcap: number}, {alibi: input}, {bias: {tensor, grad}} or {expr: number}"
        if isinstance(node.value, str):
            hint = _did_you_mean(node.value, kinds)
            if node.value in kinds:
                hint = f"'{node.value}' needs a value: {{{node.value}: …}}"
            elif node.value == "none":
                hint = "leave the field out"
            elif re.search(r"\bs\b", node.value):
                hint = "write an expression as {expr: …}"
            self.wrong(node, field, expected, hint)
            return None
        found = self.single(node, field, kinds, expected)
        if found is None:
            return None
        kind, entry = found
        path = f"{field}.{kind}"
        if kind == "softcap":
            return self.softcap(entry, path)
        if kind == "alibi":
            return self.alibi(entry, path)
        if kind == "bias":
            return self.bias(entry, path)
        return self.expression(entry, path, "score")

    def softcap(self, node: Located, field: str) -> Softcap | None:
        cap = self.number(node, field, "a number above 0")
        if cap is not None and cap <= 0:
            self.wrong(node, field, "a number above 0", "leave the item out for no cap")
            return None
        return None if cap is None else Softcap(cap)

    def alibi(self, node: Located, field: str) -> Alibi | None:
        name, declared = self.used_input(node, field)
        if name is None:
            return None
        if declared is not None:
            if declared.shape != ("q_heads",):
                self.problems.add(
                    node.place,
                    field,
                    f"'{name}' has shape {_shown(declared.shape)}, expected [q_heads]",
                    "one slope for each query head",
                )
                return None
            if DTYPES[declared.dtype].kind != "float":
                self.problems.add(
                    node.place, field, f"'{name}' is {declared.dtype}, expected fp32, fp16 or bf16"
                )
                return None
        return Alibi(name)

    def bias(self, node: Located, field: str) -> Bias | None:
        known = ("tensor", "grad")
        expected = "{tensor: input, grad: true or false}"
        if isinstance(node.value, str):
            named = re.fullmatch(INPUT_NAME_PATTERN, node.value)
            hint = f"write {{tensor: {node.value}}}" if named else None
            self.wrong(node, field, expected, hint)
            return None
        entries = self.mapping(node, field, expected, known, ("tensor",))
        if entries is None:
            return None
        grad: bool | None = False
        if "grad" in entries:
            grad = self.boolean(entries["grad"], f"{field}.grad")
        if "tensor" not in entries:
            return None
        name, declared = self.used_input(entries["tensor"], f"{field}.tensor")
        if name is None or grad is None:
            return None
        if declared is not None and not self.fits_bias(declared, entries, field, grad=grad):
            return None
        return Bias(name, grad)

    def fits_bias(
        self, declared: Input, entries: Mapping[str, Located], field: str, *, grad: bool
    ) -> bool:
        axes = ("batch", "q_heads", "q_len", "kv_len")
        name, rank = declared.name, len(declared.shape)
        place = entries["tensor"].place
        fits = rank <= len(axes) and all(
            extent in (1, axis)
            for extent, axis in zip(declared.shape, axes[len(axes) - rank :], strict=True)
        )
        if not fits:
            self.problems.add(
                place,
                f"{field}.tensor",
                f"'{name}' has shape {_shown(declared.shape)}, expected "
                "[batch, q_heads, q_len, kv_len] or less of it from the right, 1 for any of them",
                'read a tensor of another shape with {expr: "s + table[…]"}',
            )
            return False
        kind = DTYPES[declared.dtype].kind
        if kind == "boolean":
            self.problems.add(
                place,
                f"{field}.tensor",
                f"'{name}' is bool, expected a number to add to the score",
                'a boolean mask is a mask item: {expr: "' + name + '[…]"}',
            )
            return False
        if grad and kind != "float":
            self.problems.add(
                entries["grad"].place,
                f"{field}.grad",
                f"'{name}' is {declared.dtype}, and only a floating-point input has a gradient",
                "declare it fp32, fp16 or bf16, or leave grad out",
            )
            return False
        return True

    def expression(self, node: Located, field: str, place: str) -> Expr | None:
        text = self.text(node, field, "an expression, as text")
        if text is None:
            return None
        try:
            tree = parse_expression(text)
        except ExpressionError as error:
            self.in_expression(node, field, error.column, error.message, error.hint)
            return None
        meaning = check_expression(tree, self.inputs, "mask" if place == "mask" else "score")
        for fault in meaning.faults:
            self.in_expression(node, field, fault.column, fault.message, fault.hint)
        return None if meaning.faults else Expr(unparse(tree))

    def in_expression(
        self, node: Located, field: str, column: int, message: str, hint: str | None
    ) -> None:
        """A fault at `column` of an expression: at its place in the file, where that is known."""
        if node.text_place is not None:
            start = node.text_place
            self.problems.add(Place(start.line, start.column + column - 1), field, message, hint)
        else:
            self.problems.add(node.place, field, f"at column {column}: {message}", hint)

    # -- shapes ------------------------------------------------------------------------------------

    def shapes(self, node: Located, field: str, group: int | None) -> tuple[Shape, ...]:
        if not self.sound(node, field):
            return ()
        if not isinstance(node.value, tuple):
            hint = (
                "put '- ' before it: shapes are a list" if isinstance(node.value, Mapped) else None
            )
            self.wrong(node, field, "a list of {batch, q_heads, kv_heads, q_len, kv_len}", hint)
            return ()
        read = [
            self.one_shape(item, path, group) for item, path in self.items(node, field, MAX_SHAPES)
        ]
        return tuple(shape for shape in read if shape is not None)

    def one_shape(self, node: Located, field: str, group: int | None) -> Shape | None:
        entries = self.mapping(
            node, field, "{batch, q_heads, kv_heads, q_len, kv_len}", SHAPE_FIELDS, SHAPE_FIELDS
        )
        if entries is None:
            return None
        sizes: dict[str, int] = {}
        for key in SHAPE_FIELDS:
            if key in entries:
                size = self.integer(entries[key], f"{field}.{key}", 1, SHAPE_LIMITS[key])
                if size is not None:
                    sizes[key] = size
        q_heads, kv_heads = sizes.get("q_heads"), sizes.get("kv_heads")
        if q_heads is not None and kv_heads is not None:
            place, path = entries["kv_heads"].place, f"{field}.kv_heads"
            if q_heads % kv_heads:
                self.problems.add(
                    place,
                    path,
                    f"{kv_heads} does not divide q_heads = {q_heads}",
                    "grouped-query attention needs q_heads % kv_heads == 0.",
                )
                return None
            if group is not None and q_heads != group * kv_heads:
                self.problems.add(
                    place,
                    path,
                    f"{q_heads} query heads for {kv_heads} K/V heads is "
                    f"{q_heads // kv_heads} per K/V head, but heads.group is {group}",
                    "correct the shape, or write 'heads: any' to read the ratio at run time",
                )
                return None
        return Shape(**sizes) if len(sizes) == len(SHAPE_FIELDS) else None


def read_spec(document: Located, problems: Problems, required: Sequence[str]) -> dict[str, object]:
    """The canonical fields of a spec; sound only if `problems` stays empty.

    Defaults are filled in, so the result has every field of `FIELDS`.
    """
    reader = Reader(problems)
    entries = reader.mapping(document, "", "a mapping of fields", FIELDS, required) or {}
    fields: dict[str, object] = {
        "flashgen": SPEC_VERSION,
        "name": None,
        "description": None,
        "heads": Heads(),
        "scale": None,
        "mask": (),
        "align": "bottom_right",
        "score": (),
        "inputs": (),
        "sink": "none",
        "kv_lens": "none",
        "kv_cache": "contiguous",
        "layout": "bhsd",
        "dropout": 0.0,
        "loop_order": "flash2",
        "backward": False,
        "deterministic": True,
        "shapes": (),
    }

    def choice_of(choices: Sequence[str]) -> Callable[[Located, str], object]:
        return lambda node, field: reader.choice(node, field, choices)

    readers: dict[str, Callable[[Located, str], object]] = {
        "flashgen": reader.version,
        "name": reader.name,
        "description": reader.description,
        "head_dim": reader.head_dim,
        "dtype": reader.dtype,
        "heads": reader.heads,
        "scale": reader.scale,
        "inputs": reader.read_inputs,  # before mask and score, which name them
        "mask": reader.mask,
        "align": choice_of(ALIGNS),
        "score": reader.score,
        "sink": choice_of(SINKS),
        "kv_lens": choice_of(KV_LENS),
        "kv_cache": reader.kv_cache,
        "layout": choice_of(LAYOUTS),
        "dropout": reader.dropout,
        "loop_order": choice_of(LOOP_ORDERS),
        "backward": reader.boolean,
        "deterministic": reader.boolean,
    }
    for field, read in readers.items():
        if field in entries:
            fields[field] = read(entries[field], field)
    if "shapes" in entries:
        heads = fields["heads"]
        group = heads.group if isinstance(heads, Heads) else None
        fields["shapes"] = reader.shapes(entries["shapes"], "shapes", group)
    _check_together(fields, entries, problems)
    return fields


def _check_together(
    fields: Mapping[str, object], entries: Mapping[str, Located], problems: Problems
) -> None:
    """Fields that are sound by themselves and impossible together."""
    if fields["layout"] == "packed" and fields["kv_lens"] == "per_batch":
        problems.add(
            entries["kv_lens"].place,
            "kv_lens",
            "per_batch does not go with layout: packed",
            "cu_seqlens_kv already gives each sequence's length",
        )


def _shown(shape: Sequence[int | str]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _listed(choices: Sequence[str]) -> str:
    return f"{', '.join(choices[:-1])} or {choices[-1]}"


_SYNONYMS = {
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "float": "fp32",
    "fp8": "fp8_e4m3",
    "float8_e4m3fn": "fp8_e4m3",
    "e4m3": "fp8_e4m3",
    "int": "int32",
    "long": "int64",
    "boolean": "bool",
    "varlen": "packed",
    "thd": "packed",
    "sbhd": "bshd",
    "true": "per_head",
}


# Formats that exist elsewhere: who writes one means it.
_FORMATS = {
    **dict.fromkeys(
        ("fp64", "float64", "double"), "no kernel computes in fp64: fp32 is the widest"
    ),
    **dict.fromkeys(
        ("fp8_e5m2", "float8_e5m2", "e5m2", "fp4", "int4", "int8", "uint8", "int16"),
        "no kernel takes this format",
    ),
}


def _did_you_mean(got: object, choices: Sequence[str]) -> str | None:
    if isinstance(got, bool):
        got = str(got)
    if not isinstance(got, str):
        return None
    if got.lower() in _FORMATS:
        return _FORMATS[got.lower()] if "fp32" in choices else None
    likely = _SYNONYMS.get(got.lower())
    if likely not in choices:
        close = difflib.get_close_matches(got.lower()[:MAX_NAME], choices, n=1, cutoff=0.6)
        likely = close[0] if close else None
    return None if likely is None else f"did you mean '{likely}'?"


def _window_hint(keys: int) -> str | None:
    """One number: the keys that a query sees, its own the last of them."""
    if keys <= 0:
        return None
    counted = "1 key is" if keys == 1 else f"{keys:,} keys are"
    return f"{counted} {{left: {keys - 1}, right: 0}}"


def _side_hint(side: str, node: Located) -> str | None:
    """A window that does not reach the query's own key."""
    value = node.value
    if isinstance(value, bool) or not isinstance(value, int) or value >= 0:
        return None
    bound = f"k <= q - {-value}" if side == "right" else f"k >= q + {-value}"
    return f"for a window that does not reach the query's own key write {{expr: {bound}}}"


def _number_hint(value: object) -> str | None:
    if isinstance(value, str):
        text = value.strip()
        if re.fullmatch(r"[-+]?[0-9]+", text):
            return "remove the quotes"
        if re.fullmatch(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?", text):
            return "remove the quotes"
    if isinstance(value, float) and value.is_integer() and abs(value) < MAX_EXTENT:
        return f"write {int(value)}, without a decimal point"
    return None
