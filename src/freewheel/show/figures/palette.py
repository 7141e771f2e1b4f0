"""What runs, causes and events look like, in every figure of a report and of the dashboard."""

from __future__ import annotations

from typing import NamedTuple

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


class Kind(NamedTuple):
    """A kind of event: what is said of its worker, its symbol and colour in figures, and in a terminal."""

    words: str
    symbol: str
    colour: str
    style: str = ""


BAD, GOOD, ODD, PLAIN = "#d9480f", "#1f9d8a", "#e5812e", "#9aa7b5"
# A symbol and a colour, so that neither is needed alone.
EVENTS = {
    "died": Kind("died", "x", BAD, "red"),
    "failed": Kind("failed", "x-open", BAD, "red"),
    "cut": Kind("was cut off", "line-ns-open", BAD, "red"),
    "left": Kind("left", "triangle-left", PLAIN, "yellow"),
    "joined": Kind("joined", "triangle-right", GOOD, "green"),
    "restarted": Kind("was started again", "circle-open", GOOD, "green"),
    "resumed": Kind("resumed", "circle", GOOD, "green"),
    "half": Kind("was met in half an exchange", "diamond-open", ODD, "yellow"),
    "store lost": Kind("lost the rendezvous", "square", BAD, "red"),
    "store back": Kind("has the rendezvous again", "square-open", GOOD, "green"),
    "view": Kind("is in another view", "diamond", "#3b82f6"),
    "checkpoint": Kind("wrote a checkpoint", "star", "#9b6bd6"),
    "slowed": Kind("became slower", "triangle-down", ODD),
    "thinned": Kind("has thinned records", "cross-thin-open", PLAIN),
}
GRAVE = ("died", "failed", "cut", "left", "joined", "restarted")
"""Those that are marked in figures over time."""
STATES = {
    "joining": "#9b6bd6",
    "training": "#3b82f6",
    "finished": "#1f9d8a",
    "silent": "#b08a10",
    "dead": "#d9480f",
}
