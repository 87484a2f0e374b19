"""How a metric is declared: once, as the annotation of the field that counts. Pure: structs in, text out.

    put_parts: Annotated[int, counter("put_parts")] = 0
    \"\"\"New parts of blocks that clients committed.\"\"\"

The declaration yields what Prometheus reads, and the tables in the documents. The field's docstring is the metric's
help. A property is declared by the annotation of its result. Labels come from the way to the field: `each` adds the
keys of a mapping, `label` a field of the struct itself.

Samples with the same name and labels are added up, whichever fields give them. Fields without a value (None) give none.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from types import UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec

from kvpool.telemetry.histogram import Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OTHERS = "others"  # label of those that are not shown individually

Labels = Mapping[str, str]
Narrow = Callable[[Labels], Labels | None]
"""Changes the labels of a struct, to show several as one. None: what the struct counts is left out."""


class Kind(StrEnum):
    """The types of metrics, as Prometheus names them."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """The declaration of one metric at one field."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    """Labels whose values are the keys of an exported mapping, after those of the way to the field."""
    help: str = ""
    """A sentence for the reader of the number. Empty: the field's docstring."""
    read: Callable[[Any], Any] | None = None
    """Converts the field's value to a number, a `Histogram`, or a mapping of them."""
    single: str = ""
    """A label of whose values only those shown individually count: the numbers of several cannot be added up."""
    fixed: Mapping[str, str | None] = field(default_factory=dict)
    """Labels that are the same for the whole field. None: a label of the way that this metric does not have."""

    def at(self, **fixed: str | None) -> Metric:
        """The same metric with these fixed labels, at one of several fields that share it."""
        return replace(self, fixed=fixed)

    def labels_after(self, way: Iterable[str]) -> tuple[str, ...]:
        """All labels of this metric at a field that has those of its way."""
        names = dict.fromkeys((*way, *self.fixed, *self.labels))
        return tuple(name for name in names if self.fixed.get(name, "") is not None)


class Each(NamedTuple):
    """The declaration that a mapping or list of structs is exported struct by struct."""

    labels: tuple[str, ...]
    metrics: tuple[Metric, ...]
    fixed: Mapping[str, str]


class Label(NamedTuple):
    """The declaration that a field is a label of all metrics of its struct."""

    name: str


def counter(name: str, *labels: str, **how: Any) -> Metric:
    """Declare a total that only rises. how: fields of `Metric`."""
    return Metric(f"kvpool_{name}_total", Kind.COUNTER, labels, **how)


def gauge(name: str, *labels: str, **how: Any) -> Metric:
    """Declare a number that rises and falls. how: fields of `Metric`."""
    return Metric(f"kvpool_{name}", Kind.GAUGE, labels, **how)


def histogram(name: str, *labels: str, **how: Any) -> Metric:
    """Declare a distribution. how: fields of `Metric`."""
    return Metric(f"kvpool_{name}", Kind.HISTOGRAM, labels, **how)


def each(*labels: str, metrics: Iterable[Metric] = (), **fixed: str) -> Each:
    """Declare that a mapping or list is exported struct by struct.

    labels: the first one's values are the mapping's keys, the others' are set by `Narrow`. metrics: of each whole struct.
    """
    return Each(labels, tuple(metrics), fixed)


def one_of(*words: str) -> Callable[[str], dict[str, bool]]:
    """Export a word as 1 for the word that it is, and 0 for the others."""
    return lambda value: {word: word == value for word in words}


def fields_of(*names: str) -> Callable[[Any], dict[str, Any]]:
    """Export these fields of a struct, by their names."""
    return lambda value: {name: getattr(value, name) for name in names}


# ---- what is declared ------------------------------------------------------------------------------------


class Family(NamedTuple):
    """All that fields declare of one name."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str


class _Field(NamedTuple):
    name: str
    metrics: tuple[Metric, ...]
    each: Each | None
    struct: type[msgspec.Struct] | None  # that is exported in turn


class _Struct(NamedTuple):
    labels: tuple[tuple[str, str], ...]  # with the name of the field
    fields: tuple[_Field, ...]


@cache
def families(struct: type[msgspec.Struct]) -> Mapping[str, Family]:
    """The metrics that a struct and the structs in it declare, by name, in the order of the fields.

    Raises ValueError if two fields declare one name differently.
    """
    found: dict[str, Family] = {}
    for metric, way in _declared(struct, (), ()):
        labels = metric.labels_after(way)
        family = found.setdefault(
            metric.name, Family(metric.name, metric.kind, labels, metric.help)
        )
        if (family.kind, set(family.labels), family.help) != (
            metric.kind,
            set(labels),
            metric.help,
        ):
            raise ValueError(f"{metric.name} is declared in two ways")
    return found


def _declared(
    struct: type[msgspec.Struct], way: tuple[str, ...], metrics: tuple[Metric, ...]
) -> Iterator[tuple[Metric, tuple[str, ...]]]:
    known = _struct(struct)
    way += tuple(name for name, _ in known.labels)
    for metric in metrics:
        yield metric, way
    for each_field in known.fields:
        for metric in each_field.metrics:
            yield metric, way
        if each_field.struct is not None:
            added, inner, fixed = each_field.each or Each((), (), {})
            yield from _declared(each_field.struct, (*way, *fixed, *added), inner)


@cache
def _struct(struct: type[msgspec.Struct]) -> _Struct:
    labels: list[tuple[str, str]] = []
    fields: list[_Field] = []
    for name, hint, text in _hints(struct):
        notes = getattr(hint, "__metadata__", ())
        labels += [(note.name, name) for note in notes if isinstance(note, Label)]
        of_each = next((note for note in notes if isinstance(note, Each)), None)
        if of_each is not None:
            of_each = of_each._replace(metrics=_explained(of_each.metrics, text))
        inner = _struct_in(hint, of_each is not None)
        metrics = _explained(notes, text)
        if metrics or inner is not None:
            fields.append(_Field(name, metrics, of_each, inner))
    return _Struct(tuple(labels), tuple(fields))


def _explained(notes: Iterable[Any], text: str) -> tuple[Metric, ...]:
    """The metrics among the annotations, with the docstring for those that have no other help."""
    return tuple(
        replace(note, help=note.help or text) for note in notes if isinstance(note, Metric)
    )


def _hints(struct: type[msgspec.Struct]) -> Iterator[tuple[str, Any, str]]:
    """Fields and annotated properties, with their docstrings."""
    bases = [base for base in struct.__mro__ if issubclass(base, msgspec.Struct)]
    for name, hint in get_type_hints(struct, include_extras=True).items():
        texts = (_docstrings(base.__module__).get((base.__name__, name)) for base in bases)
        yield name, hint, next(filter(None, texts), "")
    for name, value in inspect.getmembers(struct, lambda value: isinstance(value, property)):
        hint = get_type_hints(value.fget, include_extras=True)["return"]
        yield name, hint, " ".join((value.__doc__ or "").split())


@cache
def _docstrings(module: str) -> dict[tuple[str, str], str]:
    """The docstrings of fields in a module's source, by class and field. Empty without the source."""
    source = "".join(linecache.getlines(sys.modules[module].__file__ or ""))
    return {
        (node.name, one.target.id): " ".join(text.value.value.split())
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
        for one, text in pairwise(node.body)
        if isinstance(one, ast.AnnAssign)
        and isinstance(one.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def _struct_in(hint: Any, deep: bool) -> type[msgspec.Struct] | None:
    """The struct that a field holds, or, if deep, its mapping or list."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return hint
    if deep or get_origin(hint) in (Annotated, Union, UnionType):
        return next(filter(None, (_struct_in(one, deep) for one in get_args(hint))), None)
    return None


# ---- what is exported ------------------------------------------------------------------------------------


def render(root: msgspec.Struct, narrow: Narrow) -> bytes:
    """Return all metrics of a struct in Prometheus' text format 0.0.4."""
    lines: list[str] = []
    for name, samples in collect(root, narrow).items():
        if samples:
            family = families(type(root))[name]
            text = family.help.replace("\\", r"\\")
            lines.append(f"# HELP {name} {text}\n# TYPE {name} {family.kind}\n")
            for values, value in samples.items():
                lines += _lines(family, values, value)
    return "".join(lines).encode()


def collect(root: msgspec.Struct, narrow: Narrow) -> dict[str, dict[tuple[str, ...], Any]]:
    """Return all samples: by the metric's name, those by the values of its labels."""
    collector = _Collector(families(type(root)), narrow)
    collector.walk(root, (), {})
    return collector.found


class _Collector:
    """Samples of a tree of structs."""

    def __init__(self, known: Mapping[str, Family], narrow: Narrow) -> None:
        self._known = known
        self._narrow = narrow
        self.found: dict[str, dict[tuple[str, ...], Any]] = {name: {} for name in known}

    def walk(self, struct: msgspec.Struct, metrics: Iterable[Metric], way: Labels) -> None:
        """Add what a struct counts, and these metrics of it as a whole."""
        declared = _struct(type(struct))
        own = {label: getattr(struct, name) for label, name in declared.labels}
        labels = self._narrow({**way, **own})
        if labels is None:
            return
        for metric in metrics:
            self._read(metric, struct, labels)
        for name, of_field, of_each, inner in declared.fields:
            value = getattr(struct, name)
            if value is None:
                continue
            for metric in of_field:
                self._read(metric, value, labels)
            if of_each is not None:
                items = value.items() if isinstance(value, dict) else [("", one) for one in value]
                for key, one in items:
                    added = dict.fromkeys(of_each.labels[:1], key)
                    self.walk(one, of_each.metrics, {**labels, **of_each.fixed, **added})
            elif inner is not None:
                self.walk(value, (), labels)

    def _read(self, metric: Metric, value: Any, way: Labels) -> None:
        if metric.single and way[metric.single] == OTHERS:
            return
        labels = {**way, **metric.fixed} if metric.fixed else way
        if metric.read is not None:
            value = metric.read(value)
        if not metric.labels:
            self._add(metric, value, labels)
            return
        for key, one in value.items():
            names = key if isinstance(key, tuple) else (key,)
            self._add(metric, one, {**labels, **dict(zip(metric.labels, names, strict=True))})

    def _add(self, metric: Metric, value: Any, labels: Mapping[str, str | None]) -> None:
        samples = self.found[metric.name]
        values: Any = tuple([labels[name] for name in self._known[metric.name].labels])
        samples[values] = _sum(samples[values], value) if values in samples else value


def _sum(one: Any, other: Any) -> Any:
    if not isinstance(one, Histogram):
        return one + other
    if one.bounds != other.bounds:
        raise ValueError("histograms of one metric have other bounds")
    counts = [a + b for a, b in zip(one.counts, other.counts, strict=True)]
    return Histogram(one.bounds, counts, one.total + other.total)


def _lines(family: Family, values: tuple[str, ...], value: Any) -> Iterator[str]:
    name = family.name
    labels = ",".join(
        f'{label}="{_escaped(one)}"' for label, one in zip(family.labels, values, strict=True)
    )
    shown = f"{{{labels}}}" if labels else ""
    if family.kind is not Kind.HISTOGRAM:
        yield f"{name}{shown} {_number(value)}\n"
        return
    before = f"{labels}," if labels else ""
    ends = [*map(_number, value.bounds), "+Inf"]
    counts = list(accumulate(value.counts))
    for end, count in zip(ends, counts, strict=True):
        yield f'{name}_bucket{{{before}le="{end}"}} {count}\n'
    yield f"{name}_sum{shown} {_number(value.total)}\n{name}_count{shown} {counts[-1]}\n"


@lru_cache(maxsize=4096)
def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return str(int(value)) if isinstance(value, int) else repr(float(value))
