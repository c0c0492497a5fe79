"""The values of an optimizer's parameter groups: read at every step, printed again only where one has changed."""

from collections.abc import Mapping
from typing import Any

from everstep.checkpoint.core.layout import Node, Section, printed
from everstep.checkpoint.core.plain import plain
from everstep.checkpoint.tensors import Part, Reading


class Groups:
    """The values of an optimizer's parameter groups, with names for its parameters, which come first."""

    def __init__(self, name: str, *, own: bool) -> None:
        self._name, self._own = name, own
        self._long = Reading(name, replicated=not own, per_rank=own)
        self._names: list[list[str]] = []
        self._known: list[_Group] = []
        self._texts: list[str | None] = []
        self._part: Part | None = None

    def part(self, groups: list[dict[str, Any]], names: list[list[str]]) -> Part:
        """Read the groups anew; `names` are another object whenever they were looked up again."""
        if names is not self._names:
            self._names, self._known, self._part = names, [_Group(each) for each in names], None
        texts = [known.text(group) for known, group in zip(self._known, groups, strict=True)]
        if None in texts:
            self._part = None
            plain_values = ({k: v for k, v in group.items() if k != "params"} for group in groups)
            return self._long.part([{"params": n, **v} for n, v in zip(names, plain_values, strict=True)])
        if self._part is None or texts != self._texts:
            tree = [known.tree() for known in self._known]
            self._texts = texts
            self._part = Part(Section(self._name, tree, (), self._own, f"[{','.join(map(str, texts))}]"), ())
        return self._part


_SCALARS = frozenset({type(None), bool, int, float, str})


class _Group:
    """One group as JSON. A value that cannot change is printed again only when another object has taken its place."""

    def __init__(self, names: list[str]) -> None:
        self._names = plain(names)
        self._keys: list[str] = []
        self._given: list[Any] = []
        self._frozen: list[bool] = []
        self._nodes: list[Node] = []
        self._texts: list[str] = []

    def text(self, group: Mapping[str, Any]) -> str | None:
        """Return the JSON of `group`; None where it holds what only the long way can tell."""
        keys, given, frozen = [*group], self._given, self._frozen
        if keys != self._keys:
            self._keys, given, frozen = keys, [None] * len(keys), [False] * len(keys)
            self._given, self._frozen, self._nodes, self._texts = given, frozen, [None] * len(keys), [""] * len(keys)
        for n, value in enumerate(group.values()):
            if (value is not given[n] or not frozen[n]) and keys[n] != "params" and not self._put(n, value):
                frozen[n] = False
                return None
        return None if self._names is None else f'{{"params":{self._names.text}{"".join(self._texts)}}}'

    def tree(self) -> Node:
        """Return the group that was printed last."""
        names = self._names.value if self._names is not None else []
        values = zip(self._keys, self._nodes, strict=True)
        return {"params": names} | {key: node for key, node in values if key != "params"}

    def _put(self, n: int, value: Any) -> bool:
        frozen = type(value) in _SCALARS or (type(value) is tuple and all(type(x) in _SCALARS for x in value))
        made = plain({self._keys[n]: None if frozen else value})
        if made is None:
            return False
        text = f"{made.text[1:-5]}{printed(value)}" if frozen else made.text[1:-1]
        node = value if frozen else made.value[self._keys[n]]
        self._given[n], self._frozen[n], self._nodes[n], self._texts[n] = value, frozen, node, f",{text}"
        return True
