"""Benchmarks: Freewheel beside others on this machine, in one run, each giving ratios.

`straggler` and `network` step through legs (`legs.py`) in real processes (`processes.py`) and compare rates
(`rates.py`); `swap` moves snapshots between two processes; `overhead` times single steps. Nothing here
prints: the command line does.
"""
