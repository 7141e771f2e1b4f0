"""``freewheel bench``: Freewheel beside others on this machine, in one run, each benchmark giving ratios.

`straggler`, `network` and `gpu` let contestants step (`contestants.py`) and compare their rates (`rates.py`);
`swap` moves snapshots between two processes; `overhead` times single steps; `faults` and `soak` kill workers
and cut links. `workers.py` runs the processes of all of them. Nothing prints but the command (`cli.py`).
"""
