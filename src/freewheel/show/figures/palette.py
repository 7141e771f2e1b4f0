"""What runs, causes and events look like, in every figure of a report and of the dashboard."""

from __future__ import annotations

# Eight colours that read on white and on black; more runs than that are told apart by their dashes. Orange is
# the straggler's, and the first three are those of the strategies most often compared, in every picture.
COLOURS = ("#c2503b", "#2f7ef5", "#16996a", "#9254de", "#0e7490", "#c0267a", "#b08a10", "#4d6b8f")
OWN = {"ddp": 0, "allreduce": 0, "adpsgd": 1, "nodelay_free": 2}
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
SVG_DASHES = ("", "7 4", "2 3", "7 3 2 3", "12 4")

GREY, FAINT = "rgba(128, 138, 150, 0.9)", "rgba(128, 138, 150, 0.28)"

# Blue for near, orange for far: told apart with every kind of colour blindness, and seen on white and black.
DISTANCES = ("#3b6fd4", "#6d93d0", "#9aa7b5", "#cf9f68", "#e5812e", "#d9480f")

# Why a worker waited: what it waits for, and a colour that no run has; dark, middle and light.
CAUSES = {
    "peers": ("for peers", "#d98c7a"),
    "data": ("for data", "#7d8ca3"),
    "checkpoint": ("for a checkpoint", "#cfa92c"),
}

# What happened: a symbol and a colour, so that neither is needed alone.
EVENTS = {
    "died": ("x", "#d9480f"),
    "failed": ("x-open", "#d9480f"),
    "cut": ("line-ns-open", "#d9480f"),
    "left": ("triangle-left", "#9aa7b5"),
    "joined": ("triangle-right", "#1f9d8a"),
    "restarted": ("circle-open", "#1f9d8a"),
    "resumed": ("circle", "#1f9d8a"),
    "half": ("diamond-open", "#e5812e"),
    "store lost": ("square", "#d9480f"),
    "store back": ("square-open", "#1f9d8a"),
    "view": ("diamond", "#3b82f6"),
    "checkpoint": ("star", "#9b6bd6"),
    "slowed": ("triangle-down", "#e5812e"),
    "thinned": ("cross-thin-open", "#9aa7b5"),
}
STATES = {
    "joining": "#9b6bd6",
    "training": "#3b82f6",
    "finished": "#1f9d8a",
    "silent": "#b08a10",
    "dead": "#d9480f",
}
