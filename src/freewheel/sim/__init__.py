"""Virtual time: the same strategies on a clock that jumps, over links that are modelled."""
