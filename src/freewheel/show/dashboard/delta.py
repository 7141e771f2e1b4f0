"""What has changed between two values of JSON, so that a page that has the old one is sent little.

A change is `{"v": value}` (this, whole), `{"d": {key: change}, "x": [keys that are gone]}` (of an object),
`{"i": {place: change}}` (of a list whose items are lists or objects), or `{"k": count, "a": [values]}` (of
a list: keep so many, then these). `page.js` has the other half.
"""

from __future__ import annotations

from typing import Any

Change = dict[str, Any]


def delta(old: Any, new: Any) -> Change | None:
    """How to make `new` of `old`; None: they are equal."""
    if isinstance(old, dict) and isinstance(new, dict):
        changes = {key: {"v": value} for key, value in new.items() if key not in old}
        changes |= {key: change for key in new if key in old and (change := delta(old[key], new[key]))}
        gone = [key for key in old if key not in new]
        if not changes and not gone:
            return None
        return {"d": changes, "x": gone} if gone else {"d": changes}
    if isinstance(old, list) and isinstance(new, list):
        return None if old == new else _of_lists(old, new)
    return None if old == new and type(old) is type(new) else {"v": new}


def _of_lists(old: list[Any], new: list[Any]) -> Change:
    if new and len(old) == len(new) and all(isinstance(item, dict | list) for item in (*old, *new)):
        pairs = enumerate(zip(old, new, strict=True))
        return {"i": {str(place): change for place, pair in pairs if (change := delta(*pair))}}
    same = 0
    for before, after in zip(old, new, strict=False):
        if before != after:
            break
        same += 1
    return {"k": same, "a": new[same:]}


def apply(old: Any, change: Change | None) -> Any:
    """`new` again; what `page.js` does."""
    if change is None:
        return old
    if "v" in change:
        return change["v"]
    if "k" in change:
        return old[: change["k"]] + change["a"]
    if "i" in change:
        return [apply(item, change["i"].get(str(place))) for place, item in enumerate(old)]
    gone = change.get("x", ())
    changed = {key: apply(old.get(key), part) for key, part in change["d"].items()}
    return {key: value for key, value in old.items() if key not in gone} | changed
